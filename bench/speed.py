"""Times and counters of one norm at one shape, for us and for every peer, interleaved in one
process.
"""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers import JAX_PEERS, installed, torch_cpu
from bench.shapes import IMAGES, LARGE, ROWS, SHAPES, Shape
from jaxnorm.experiments.runs import OnProgress

NORMS = (*ROWS, *IMAGES)
DTYPES = ("float32", "bfloat16")
PEERS = tuple(peer for peer in (*JAX_PEERS, "torch") if installed(peer))
COPY = "copy"  # reads and writes as many bytes as a norm must: the scale of bytes per second
KINDS = ("forward", "gradients", "eager")
SAMPLE = 5e-3  # seconds that a measured sample lasts at least


@dataclass(frozen=True)
class Case:
    norm: str
    shape: str
    dtype: str


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    norms: tuple[str, ...] = NORMS
    shapes: tuple[str, ...] = tuple(SHAPES)
    dtypes: tuple[str, ...] = DTYPES
    peers: tuple[str, ...] = PEERS
    rounds: int = 15

    def runs(self) -> list[Case]:
        """Those norms that a shape is for."""
        return [
            Case(norm, shape, dtype)
            for dtype in self.dtypes
            for shape in self.shapes
            for norm in self.norms
            if norm in (LARGE | SHAPES)[shape].norms
        ]


def arrays(case: Case) -> tuple[jax.Array, ...]:
    """x, scale, bias and the cotangent of y."""
    shape, keys = Shape.sizes(case.shape), jax.random.split(jax.random.key(0), 4)
    x, cotangent = (jax.random.normal(key, shape, case.dtype) for key in keys[:2])
    return (
        x,
        1 + jax.random.normal(keys[2], shape[-1:]),
        jax.random.normal(keys[3], shape[-1:]),
        cotangent,
    )


def with_gradients(norm: Callable) -> Callable:
    """y, and the gradients of x, scale and bias."""

    def call(x, scale, bias, cotangent):
        y, pullback = jax.vjp(norm, x, scale, bias)
        return y, pullback(cotangent.astype(y.dtype))

    return call


def counters(norm: Callable, x, scale, bias, cotangent) -> tuple[dict[str, float], Callable]:
    """What does not vary, and the compiled gradients; of arrays, or their shapes and dtypes."""
    residuals = jax.eval_shape(
        lambda *given: jax.tree.leaves(jax.vjp(norm, *given)[1]), x, scale, bias
    )
    started = time.perf_counter()
    compiled = jax.jit(with_gradients(norm)).lower(x, scale, bias, cotangent).compile()
    return {
        "compile_s": time.perf_counter() - started,
        "residual_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in residuals) / x.size,
        "temporaries": compiled.memory_analysis().temp_size_in_bytes / (x.size * x.dtype.itemsize),
    }, compiled


def jax_calls(norm: Callable, case: Case) -> tuple[dict[str, Callable], dict[str, float]]:
    x, scale, bias, cotangent = arrays(case)
    facts, compiled = counters(norm, x, scale, bias, cotangent)
    forward = jax.jit(norm).lower(x, scale, bias).compile()
    calls = {
        "forward": partial(forward, x, scale, bias),
        "gradients": partial(compiled, x, scale, bias, cotangent),
    }
    return calls | ({"eager": partial(norm, x, scale, bias)} if x.size < 1000 else {}), facts


def torch_calls(norm: Callable, case: Case) -> dict[str, Callable]:
    import torch

    dtype = getattr(torch, case.dtype)
    x, scale, bias, cotangent = (
        torch.tensor(np.asarray(a, np.float32)).to(dtype) for a in arrays(case)
    )
    wanted = [a.requires_grad_() for a in ((x, scale) if case.norm == "rms" else (x, scale, bias))]

    def forward():
        with torch.no_grad():
            return norm(x, scale, bias)

    def gradients():
        y = norm(x, scale, bias)
        return y.detach(), torch.autograd.grad(y, wanted, cotangent)

    return {"forward": forward, "gradients": gradients} | (
        {"eager": forward} if x.numel() < 1000 else {}
    )


def measure(case: Case, on_progress: OnProgress, peers: tuple[str, ...], rounds: int) -> dict:
    """Milliseconds (median, least), CPU milliseconds, page faults and counters of each peer."""
    calls: dict[tuple[str, str], Callable] = {}
    facts: dict[str, dict[str, float]] = {}
    steps = rounds + len(peers) + 1
    for number, peer in enumerate(peers):
        on_progress(number, steps)
        if peer in JAX_PEERS and case.norm in (norms := JAX_PEERS[peer]()):
            found, facts[peer] = jax_calls(norms[case.norm], case)
        elif peer == "torch" and case.norm in (norms := torch_cpu()):
            found = torch_calls(norms[case.norm], case)
        else:
            continue
        calls |= {(peer, kind): call for kind, call in found.items()}
    x = arrays(case)[0]
    calls[COPY, "forward"] = partial(jax.jit(jnp.negative).lower(x).compile(), x)
    repeats = {key: repeats_for(call) for key, call in calls.items()}
    samples: dict[tuple[str, str], list[tuple[float, float, int]]] = {key: [] for key in calls}
    for done in range(rounds):
        on_progress(len(peers) + 1 + done, steps)
        for key, call in calls.items():
            samples[key].append(sample(call, repeats[key]))
    result: dict[str, dict] = {peer: dict(facts.get(peer, {})) for peer, _ in calls}
    for (peer, kind), found in samples.items():
        wall, cpu, faults = (np.array(column, float) for column in zip(*found, strict=True))
        result[peer][kind] = {
            "ms": 1e3 * float(np.median(wall)),
            "least_ms": 1e3 * float(wall.min()),
            "cpu_ms": 1e3 * float(np.median(cpu)),
            "faults": float(np.median(faults)),
        }
    return {"peers": result}


def repeats_for(call: Callable) -> int:
    """How many calls make a sample, after warming up."""
    for _ in range(3):
        jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    return max(1, round(SAMPLE / (time.perf_counter() - started)))


def sample(call: Callable, repeats: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds and page faults of a call that follows one of its own, as the steps of a
    training do.

    That one is not counted: it may be the first in a while to need so much memory, which a virtual
    machine gives back to its host when nothing has used it for two seconds, and gets again more
    slowly than the system clears it.
    """
    jax.block_until_ready(call())
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds / repeats, cpu / repeats, (after.ru_minflt - before.ru_minflt) / repeats


def imports() -> dict[str, float]:
    """Seconds to import each package in a process of its own, jax among them."""
    found = {}
    for package in ("jax", "jaxnorm", "flax.linen"):
        code = (
            f"import time; t = time.perf_counter(); import {package}; "
            "print(time.perf_counter() - t)"
        )
        times = [
            float(
                subprocess.run(
                    [sys.executable, "-c", code], capture_output=True, text=True, check=True
                ).stdout
            )
            for _ in range(5)
        ]
        found[package] = float(np.median(times))
    return found
