"""Compare derivatives, vmap, remat and loops of the CPU kernels with plain JAX.

Plain JAX is tested by the other files.
"""

from functools import partial
from itertools import compress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from wide import WIDE, arguments, close, with_gradients

import jaxnorm as jn


def kernels_agree(use, call, given, bound):
    """With plain JAX."""
    results = []
    for implementation in ("xla", "native"):
        use(implementation)
        # of a new function, of which JAX remembers nothing
        program = jax.jit(lambda given: call(*given)).lower(given)
        assert ("@Jaxnorm" in program.as_text()) == (implementation == "native")
        results.append(program.compile()(given))
    close(results[1], results[0], bound)


def mask(shape):
    """Of examples and positions; of the second example nothing is left."""
    where = np.random.default_rng(1).random((*shape[:-1], 1)) < 0.6
    where[1] = False
    return jnp.asarray(where)


OPTIONS = [
    {"correction": 1},
    {"epsilon_in": "std"},
    {"epsilon_in": "max", "epsilon": 1.0},  # some groups have less, and some more
    {"epsilon": 0.0},
    {"dtype": "bfloat16"},
]
RULES = pytest.mark.parametrize(
    "options",
    [{**options, **more} for more in ({}, {"masked": True}) for options in OPTIONS],
    ids=str,
)


@RULES
def test_every_rule(options, rng, use):
    given = arguments(rng, (8, 33))
    given = (given[0].at[0].set(2.0), *given[1:])  # a row without spread
    kernels_agree(
        use,
        partial(with_gradients, partial(_rows, **options)),
        given,
        2e-6 if "dtype" not in options else 2**-6,
    )


@pytest.mark.slow
@RULES
@pytest.mark.usefixtures("usual_compile_of_class")
def test_every_rule_of_which_a_kernel_has_the_statistics(options, rng, use):
    given = arguments(rng, (3, 23, 24, 8))
    given = (given[0].at[0].set(2.0), *given[1:])
    kernels_agree(
        use,
        partial(with_gradients, partial(_groups, **options)),
        given,
        2e-6 if "dtype" not in options else 2**-6,
    )


def _groups(x, scale, bias, *, masked=False, **options):
    return jn.standardize(
        x,
        "n [h w] (g [c])",
        g=2,
        scale=scale,
        bias=bias,
        where=mask(x.shape) if masked else None,
        **options,
    )


def _rows(x, scale, bias, *, masked=False, **options):
    return jn.standardize(
        x, "n [c]", scale=scale, bias=bias, where=mask(x.shape) if masked else None, **options
    )


KINDS = [("rows", 8), ("rows", 80), ("rms", 80), ("batch", 8), ("group", 8), ("adaptive", 8)]


@pytest.mark.parametrize(("name", "width"), long_sweep(KINDS, quick=[("rows", 8)]))
def test_transformations(name, width, rng, use):
    """Of small groups and others."""
    norm, shape = WIDE[name]
    check_transformations(norm, (*(min(size, 8) for size in shape[:-1]), width), rng, use)


@pytest.mark.parametrize(("name", "width"), long_sweep(KINDS[:-1], quick=[("batch", 8)]))
def test_transformations_beside_a_mask(name, width, rng, use):
    norm, shape = WIDE[name]
    shape = (*(min(size, 8) for size in shape[:-1]), width)
    check_transformations(partial(norm, where=mask(shape)), shape, rng, use)


MAPPED = [
    (shape, mapped)
    for shape in ((8, 8), (6, 5, 8), (2, 600, 8))
    for mapped in ((0, 0), (None, 0), (0, None))
]


@pytest.mark.parametrize(("shape", "mapped"), long_sweep(MAPPED, quick=MAPPED[::4]), ids=str)
def test_vmap_over_masks(shape, mapped, rng, use):
    """Over both, over masks, and over arrays alone."""
    norm = WIDE["rows" if len(shape) == 2 else "batch"][0]
    given = arguments(rng, shape)
    several = lambda a, axis: a if axis is None else jnp.stack([a, a[::-1], a + a])
    call = lambda x, where: with_gradients(norm, x, *given[1:], where=where)
    kernels_agree(
        use, jax.vmap(call, mapped), tuple(map(several, (given[0], mask(shape)), mapped)), 5e-6
    )


def check_transformations(norm, shape, rng, use):
    """vmap over x, over parameters and over cotangents, checkpoint, and derivatives of the second
    order.
    """
    given = arguments(rng, shape)
    stacked = [jnp.stack([a, 2 * a, a + 1]) for a in given]
    direction = (given[3][::-1], *arguments(rng, shape)[1:3])
    both = partial(with_gradients, norm)

    def loss(x, scale, bias, cotangent):
        return (jnp.sin(norm(x, scale, bias)) * cotangent).sum()

    def along(at, direction):
        return sum(
            jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(loss, (0, 1, 2))(*at), direction))
        )

    ways = [
        lambda at, more, to: jax.vmap(both)(*more),
        lambda at, more, to: jax.vmap(both, (None, None, None, 0))(*at[:3], more[3]),
        lambda at, more, to: jax.jvp(norm, at[:3], to),
        lambda at, more, to: jax.jvp(lambda *of: jax.grad(loss, (0, 1, 2))(*of, at[3]), at[:3], to)[
            1
        ],
        lambda at, more, to: jax.grad(along)(at, to)[:3],
        lambda at, more, to: (
            norm(*at[:3]),
            jax.linear_transpose(lambda ct: jax.vjp(norm, *at[:3])[1](ct)[0], at[3])(at[3])[0],
        ),
        lambda at, more, to: jax.vmap(both, (0, None, None, None))(more[0], *at[1:]),
        lambda at, more, to: jax.grad(jax.checkpoint(lambda *of: loss(*of)))(*at),
    ]
    for call in ways:
        kernels_agree(use, call, (tuple(given), stacked, direction), 2e-5)


# positions: XLA has the output
MANY = {"batch": (2, 17, 18, 8), "group": (2, 23, 24, 8), "adaptive": (2, 600, 8)}


@pytest.mark.parametrize("name", long_sweep(MANY, quick=()))
@pytest.mark.usefixtures("usual_compile_of_class")
def test_transformations_of_which_a_kernel_has_the_statistics(name, rng, use):
    check_transformations(WIDE[name][0], MANY[name], rng, use)


@pytest.mark.parametrize("name", long_sweep(["rows", "batch"], quick=["batch"]))
def test_second_order_through_a_loop(name, rng, use):
    """JAX takes loops apart, and with them the derivatives of what is in them."""
    norm, shape = WIDE[name]
    given = arguments(rng, (*(min(size, 8) for size in shape[:-1]), 8))

    def second_order(x, scale, bias, direction):
        # no row comes near a constant
        step = lambda x, _: (jnp.sin(norm(x, scale, bias)) + 0.5 * x, None)
        gradient = jax.jit(jax.grad(lambda x: (jax.lax.scan(step, x, None, 3)[0] ** 2).sum()))
        return jax.jvp(gradient, (x,), (direction,))[1]

    kernels_agree(use, second_order, given, 2e-5)


@pytest.mark.parametrize("shown", [(1, 1, 1), (0, 1, 0), (0, 0, 1), (0, 1, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("shape", [(40, 5), (600, 2)], ids=str)
def test_moments_of_batch_norm_and_their_gradients(shape, masked, shown, rng, use):
    """Of what the loss leaves out a kernel gets no cotangents; the statistics of 40 elements it
    recomputes.
    """
    x = jnp.asarray(rng.standard_normal(shape).astype(np.float32) + 100)

    def both(x):
        y, found = jn.batch_norm(x, where=mask(shape) if masked else None)
        parts = jnp.sin(y).sum(), found.mean.sum() * 3, (found.var**2).sum()
        return sum(compress(parts, shown)), found

    kernels_agree(use, jax.value_and_grad(both, has_aux=True), (x,), 2e-6)


def test_moments_of_numbers_whose_squares_are_small(rng, use):
    """They are given in units that the derivative takes as well."""
    x = jnp.asarray(rng.standard_normal((40, 5)).astype(np.float32) * 1e-12)

    def parts(x):
        y, found = jn.batch_norm(x, epsilon=0.0)
        return jnp.sin(y), found.mean / 1e-12, found.var / 1e-24

    def derivatives(x):
        of, pull = jax.vjp(parts, x)
        return jax.jvp(parts, (x,), (x[::-1],)), pull(jax.tree.map(jnp.ones_like, of))[0] * 1e-12

    kernels_agree(use, derivatives, (x,), 5e-6)
