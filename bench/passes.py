"""What a norm alone costs an accelerator, counted in programs that are compiled for one."""

import re
from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from bench.peers import JAX_PEERS, installed
from bench.shapes import LARGE, Shape
from bench.speed import with_gradients
from bench.targets import compiled, kernels_for
from bench.transfers import COLLECTIVE, transferred

SHAPES = {norm: Shape.sizes(name) for name, shape in LARGE.items() for norm in shape.norms}


def peers(platform: str) -> tuple[str, ...]:
    """Return whose norms can be compared on a platform: ours twice where it has kernels."""
    left_out = () if kernels_for(platform) else ("jaxnorm",)
    return tuple(peer for peer in JAX_PEERS if installed(peer) and peer not in left_out)


def types_of(
    shape: tuple[int, ...], dtype: str, of_x: Sharding, of_params: Sharding
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return the types of x, scale, bias and the cotangent of y."""
    x, param = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=of_x),
        jax.ShapeDtypeStruct(shape[-1:], dtype, sharding=of_params),
    )
    return x, param, param, x


def keeping(norm: Callable, x, scale, bias) -> str:
    """Return the program of the output and the residuals, but for those that are arguments."""

    def forward(*given):
        return jax.vjp(norm, *given)

    traced = jax.make_jaxpr(forward)(x, scale, bias).jaxpr
    made = [
        place
        for place, of in enumerate(traced.outvars)
        if not isinstance(of, Literal) and of not in traced.invars
    ]
    program = compiled(
        lambda *given: [jax.tree.leaves(forward(*given))[place] for place in made], x, scale, bias
    )
    return program.as_text()


def gradients(norm: Callable, x, scale, bias) -> str:
    """Return the program of the gradients, given the residuals and the cotangent of y."""
    y, pullback = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=x.sharding),
        jax.eval_shape(lambda *given: jax.vjp(norm, *given), x, scale, bias),
    )
    return compiled(lambda pullback, dy: pullback(dy), pullback, y).as_text()


def count(
    norm: Callable, shape: tuple[int, ...], dtype: str, devices: list, cost: Callable[[str], int]
) -> dict:
    """Return the counters of the output, and of it with all gradients; of these also the
    collectives where x is sharded, by the axis.
    """
    one = SingleDeviceSharding(devices[0])
    types = types_of(shape, dtype, one, one)
    size = types[0].size * types[0].dtype.itemsize
    programs = [compiled(norm, *types[:3]), compiled(with_gradients(norm), *types)]
    texts = [program.as_text() for program in programs]
    found: dict = {
        "passes": [transferred(text) / size for text in texts],
        "apart": [transferred(make(norm, *types[:3])) / size for make in (keeping, gradients)],
        "cost": list(map(cost, texts)),
        "temporaries": [
            program.memory_analysis().temp_size_in_bytes / size for program in programs
        ],
        "collectives": {},
    }
    mesh = Mesh(np.array(devices), ("chips",))
    for name, axis in (("first", 0), ("last", len(shape) - 1)):
        of_x = NamedSharding(
            mesh, P(*("chips" if at == axis else None for at in range(len(shape))))
        )
        program = compiled(
            with_gradients(norm), *types_of(shape, dtype, of_x, NamedSharding(mesh, P()))
        )
        found["collectives"][name] = Counter(re.findall(COLLECTIVE, program.as_text()))
    return found
