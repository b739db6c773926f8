"""Counters of our norms, which do not vary from run to run, and their bounds in bounds.json.

On a CPU they are residuals and temporaries. Where the compiler of an accelerator is installed, they
are the sizes of x that its programs move, and on a GPU the kernels that they start.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.progress import track

from bench import passes, speed
from bench.peers import JAX_PEERS
from bench.targets import TARGETS, NoCompilerError, Target, asked_by, compiled, compiling_for
from bench.transfers import kernels, transferred
from jaxnorm.kernels.cpu import loading

PLATFORMS = ("cpu", *TARGETS)
BOUNDS = Path(__file__).parent / "bounds.json"
OURS = ("jaxnorm, plain JAX", "jaxnorm")
ON_CPU = ("residual_bytes", "temporaries")
AHEAD = ("layer", "rms", "batch", "instance", "group")
Counters = dict[str, float]


def rounded_up(counter: float) -> float:
    """Return a counter with two decimals, so that it is a bound of itself."""
    return round(counter + 0.005, 2)


def on_cpu() -> Iterator[tuple[str, Counters]]:
    """Yield each case that runs on this CPU, and its counters."""
    for case in speed.Settings().runs():
        for peer in OURS:
            if peer == "jaxnorm" and not loading.built():
                continue
            found, _ = speed.counters(
                JAX_PEERS[peer]()[case.norm], *jax.eval_shape(partial(speed.arrays, case))
            )
            counters = {name: rounded_up(found[name]) for name in ON_CPU}
            yield f"{peer}: {case.norm} {case.shape} {case.dtype}", counters


def ahead(target: Target, console: Console) -> Iterator[tuple[str, Counters]]:
    """Yield each case compiled for an accelerator, and its counters.

    Raises:
      NoCompilerError: its compiler cannot be used here.
    """
    with compiling_for(target) as devices:
        cases = [
            (peer, norm, dtype)
            for peer in OURS
            for norm in AHEAD
            for dtype in speed.DTYPES
            if peer in passes.peers(target.platform)
        ]
        one = SingleDeviceSharding(devices[0])
        title, hidden = f"For a {target.platform}", not console.is_terminal
        for peer, norm, dtype in track(cases, title, console=console, disable=hidden):
            types = passes.types_of(passes.SHAPES[norm], dtype, one, one)
            with asked_by(peer, target.platform):
                counters = of_programs(JAX_PEERS[peer]()[norm], target, *types[:3])
            yield f"{peer}: {norm} {dtype} on a {target.platform}", counters


def of_programs(norm: Callable, target: Target, x, scale, bias) -> Counters:
    """Return the counters of the output, and of the gradients given the residuals."""
    texts = {
        "output": compiled(norm, x, scale, bias).as_text(),
        "gradients": passes.gradients(norm, x, scale, bias),
    }
    size = x.size * x.dtype.itemsize
    found = {f"sizes_{name}": rounded_up(transferred(text) / size) for name, text in texts.items()}
    if target.cost is kernels:
        found |= {f"kernels_{name}": kernels(text) for name, text in texts.items()}
    return found


def counted(platforms: Iterable[str], console: Console) -> dict[str, Counters]:
    """Return the counters of all cases on these platforms, and say which cannot be counted."""
    found: dict[str, Counters] = {}
    for platform in platforms:
        try:
            found |= on_cpu() if platform == "cpu" else ahead(TARGETS[platform], console)
        except NoCompilerError as error:
            console.print(f"Not checked: {error}.", markup=False, soft_wrap=True)
    return found


def check(platforms: Iterable[str], console: Console, write: bool) -> int:
    """Compare the counters with the bounds, or make them the bounds, and return the exit status.

    Other bounds stay.
    """
    found = counted(platforms, console)
    bounds = json.loads(BOUNDS.read_text())
    if write:
        BOUNDS.write_text(json.dumps(bounds | found, indent=1) + "\n")
        console.print(f"Written: {BOUNDS}")
        return 0
    worse = [
        f"{name}: {counter} {number}, at most {bounds[name][counter]}"
        if name in bounds
        else f"{name}: {counter} {number}, without a bound"
        for name, numbers in found.items()
        for counter, number in numbers.items()
        if name not in bounds or number > bounds[name][counter]
    ]
    console.print("\n".join(worse) or f"{len(found)} cases keep within their bounds.", markup=False)
    return 1 if worse else 0
