"""Compare derivatives of both modes and two orders with differences and each other.

They share two programs, since compiling takes longest.
"""

import jax
import numpy as np
from wide import close

STEP = 1e-5  # an error of its square, and of 1e-16 divided by it

# the same number twice: along a direction, the first or the second, and of what is shown of the
# result
PAIRS = (
    ("reverse", "forward", 0),
    ("reverse of forward", "forward of forward", 1),
    ("forward of reverse", "forward of forward", 0),
    ("reverse of reverse", "forward of forward", 1),
)


def check_derivatives(call, arguments, bound=1e-7):
    """Check the derivatives of a function from float64 arrays to one array.

    They are taken along random directions, and compared within ``bound`` of the largest
    difference.
    """
    call, rng = jax.jit(call), np.random.default_rng(1)
    like = lambda arrays: tuple(rng.standard_normal(a.shape) for a in arrays)
    arguments = tuple(map(np.asarray, arguments))
    first, second = like(arguments), like(arguments)
    (shown,) = like([jax.eval_shape(call, *arguments)])

    def forward(*at):
        return jax.jvp(call, at, first)[1]

    def reverse(*at):
        return jax.vjp(call, *at)[1](shown)

    @jax.jit
    def derivatives(*at):
        once, twice = jax.jvp(forward, at, second)
        back, along = jax.jvp(reverse, at, second)
        return {
            "forward": once,
            "reverse": back,
            "forward of forward": twice,
            "reverse of forward": jax.vjp(forward, *at)[1](shown),
            "forward of reverse": along,
            "reverse of reverse": jax.vjp(reverse, *at)[1](first),
        }

    def difference(function, direction):
        ahead, behind = (
            function(*(a + step * d for a, d in zip(arguments, direction, strict=True)))
            for step in (STEP, -STEP)
        )
        return (np.asarray(ahead) - np.asarray(behind)) / (2 * STEP)

    found = derivatives(*arguments)
    close(found["forward"], difference(call, first), bound)
    close(
        found["forward of forward"],
        difference(lambda *at: derivatives(*at)["forward"], second),
        bound,
    )
    for name, of, direction in PAIRS:
        along = sum(
            np.vdot(a, b) for a, b in zip(found[name], (first, second)[direction], strict=True)
        )
        close(
            along,
            np.vdot(shown, found[of]),
            1e-10,
            least=np.linalg.norm(shown) * np.linalg.norm(found[of]),
        )
