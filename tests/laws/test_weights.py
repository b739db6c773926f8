"""Compare spectral norm with NumPy's singular values, at any size and in any dtype.

It also works after weights that have no direction. Weight norm is tested here too.
"""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from flax import nnx as flax_nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxnorm as jn
from jaxnorm import linen, nnx

SHAPES = {"tall": (5, 3), "wide": (2, 3), "of a convolution": (3, 3, 4, 3)}
U = np.ones((1, 3), np.float32)


def kernel(rng, by=1.0, shape=(5, 3)):
    return (rng.standard_normal(shape) * by).astype(np.float32)


@pytest.mark.parametrize("shape", long_sweep(SHAPES, quick=["tall"]))
@pytest.mark.parametrize("by", [1e-35, 1e-20, 1e-7, 1.0, 1e7, 1e20, 1e37])
def test_of_any_size(by, shape, rng):
    k = kernel(rng, by, SHAPES[shape])
    exact = np.linalg.norm(k.reshape(-1, 3).astype(np.float64), 2)
    normalized, u, sigma = jn.spectral_norm(k, U, n_steps=200)
    assert float(sigma) == pytest.approx(exact, rel=1e-6)
    np.testing.assert_allclose(normalized, k.astype(np.float64) / exact, rtol=1e-6, atol=1e-6)
    assert np.linalg.norm(u) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("broken", [0.0, np.nan, np.inf])
def test_a_kernel_without_a_direction_leaves_the_vector(broken, rng):
    k, (_, u, _) = kernel(rng), jn.spectral_norm(kernel(rng), U, n_steps=5)
    y, same, sigma = jn.spectral_norm(np.full((5, 3), np.float32(broken)), u)
    np.testing.assert_array_equal(same, u)
    assert broken != 0 or (float(sigma) == 0 and not np.asarray(y).any())
    assert float(jn.spectral_norm(k, same, n_steps=200)[2]) == pytest.approx(
        np.linalg.norm(k, 2), rel=1e-6
    )


def test_a_vector_of_zeros_is_begun_anew(rng):
    """As checkpoints may hold one, of which every other would be 0 as well."""
    k = kernel(rng)
    assert float(jn.spectral_norm(k, 0 * U, n_steps=200)[2]) == pytest.approx(
        np.linalg.norm(k, 2), rel=1e-6
    )


@pytest.mark.parametrize("family", ["linen", "nnx"])
def test_modules_after_a_kernel_of_zeros(family, rng):
    if family == "nnx" and not hasattr(flax_nnx, "SpectralNorm"):
        pytest.skip("this Flax has no such class: test_nnx.py has the error")
    x, k = np.eye(4, dtype=np.float32), kernel(rng, 10, (4, 3))
    if family == "linen":
        norm = linen.SpectralNorm(
            flax.linen.Dense(3, kernel_init=flax.linen.initializers.zeros, use_bias=False)
        )
        variables = norm.init(jax.random.key(0), x, update_stats=False)
        for params in (variables["params"], jax.tree.map(lambda _: k, variables["params"])):
            for _ in range(100):
                y, updated = norm.apply(
                    {**variables, "params": params}, x, update_stats=True, mutable=["batch_stats"]
                )
                variables = {**variables, **updated}
    else:
        layer = flax_nnx.Linear(
            4, 3, use_bias=False, kernel_init=flax_nnx.initializers.zeros, rngs=flax_nnx.Rngs(0)
        )
        norm = nnx.SpectralNorm(layer, rngs=flax_nnx.Rngs(0))
        for value in (layer.kernel[...], jnp.asarray(k)):
            layer.kernel[...] = value
            for _ in range(100):
                y = norm(x)
    assert np.linalg.norm(y, 2) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_computed_in_float32(dtype, rng):
    k = jnp.asarray(300 * np.abs(kernel(rng, 1, (300, 3))), dtype)
    exact = np.linalg.norm(np.asarray(k, np.float64), 2)
    y, u, sigma = jn.spectral_norm(k, U, n_steps=50)
    assert (y.dtype, u.dtype, sigma.dtype) == (jnp.dtype(dtype), np.float32, np.float32)
    assert float(sigma) == pytest.approx(exact, rel=1e-6)
    np.testing.assert_allclose(
        np.asarray(y, np.float64),
        np.asarray(k, np.float64) / exact,
        rtol=0.51 * float(jnp.finfo(dtype).eps),
    )


@pytest.mark.slow
def test_gradients_are_differences(rng, x64):
    """The vectors are constants, which at their limit changes nothing."""
    k, direction, weights = rng.standard_normal((3, 5, 3)) * 1e-9
    loss = lambda k: (jn.spectral_norm(k, np.ones((1, 3)), n_steps=300)[0] * weights * 1e9).sum()
    h = 1e-6
    difference = (loss(k + h * direction) - loss(k - h * direction)) / (2 * h)
    assert float((jax.grad(loss)(jnp.asarray(k)) * direction).sum()) == pytest.approx(
        float(difference), rel=1e-7
    )


def test_kernels_are_real():
    with pytest.raises(TypeError, match="kernel must be real: got complex64"):
        jn.spectral_norm(np.ones((2, 3), np.complex64), U)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_a_kernel_without_elements(shape):
    y, u, sigma = jn.spectral_norm(np.zeros(shape, np.float32), np.ones((1, shape[1]), np.float32))
    assert (y.shape, u.shape, float(sigma)) == (shape, (1, shape[1]), 0)


def test_a_traced_epsilon_of_half_precision_is_divided_in_float32():
    kernel = jnp.full((3000, 1), 1e-6)
    found = jax.jit(lambda e: jn.weight_norm(kernel, epsilon=e))(jnp.float16(1e-5))
    np.testing.assert_allclose(
        found, kernel / np.sqrt(np.float32(np.float16(1e-5)) + 3000e-12), rtol=1e-5
    )


def test_by_sigma_of_0_nothing_is_divided():
    """The vector is orthogonal to all that the kernel gives."""
    kernel = np.diag(np.float32([3, 0]))
    found, _, sigma = jn.spectral_norm(kernel, np.float32([[0, 1]]))
    np.testing.assert_array_equal(found, kernel)
    assert float(sigma) == 0


@pytest.mark.parametrize("spec", [P("m", None, "n"), P(None, None, ("m", "n"))], ids=str)
def test_a_kernel_that_is_explicitly_sharded(spec, rng):
    mesh = jax.make_mesh(
        (2, 2), ("m", "n"), devices=jax.devices()[:4], axis_types=(AxisType.Explicit,) * 2
    )
    kernel, u = (
        rng.standard_normal((4, 3, 8)).astype(np.float32),
        rng.standard_normal((1, 8)).astype(np.float32),
    )

    def loss(kernel, u):
        y, u, sigma = jn.spectral_norm(kernel, u)
        return (jnp.sin(y).sum() + sigma).sum(), (y, u, sigma)

    truth = jax.grad(loss, has_aux=True)(kernel, u)
    with jax.set_mesh(mesh):
        placed = jax.device_put(kernel, NamedSharding(mesh, spec))
        found = jax.jit(jax.grad(loss, has_aux=True))(placed, jnp.asarray(u))
    assert jax.typeof(found[1][0]).sharding.spec == spec
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", [None, "reference", "xla", "native"])
@pytest.mark.parametrize(("by", "full_range"), [(1.0, False), (1e25, True)])
@pytest.mark.usefixtures("use")
def test_weight_norm_by_every_implementation(implementation, by, full_range, rng):
    """Output and gradient are those of float64: kernel / length * scale, and dy less its part along
    the kernel.
    """
    k, scale, dy = kernel(rng, by), np.float32([1, 2, 3]), kernel(rng)
    y, vjp = jax.vjp(
        lambda k: jn.weight_norm(k, scale, full_range=full_range, implementation=implementation), k
    )
    exact = k.astype(np.float64)
    unit = exact / (length := np.linalg.norm(exact, axis=0))
    np.testing.assert_allclose(y, unit * scale, rtol=1e-6)
    np.testing.assert_allclose(
        vjp(dy)[0] * by,
        scale * by / length * (dy - unit * (unit * dy).sum(0)),
        rtol=3e-6,
        atol=1e-6,
    )


def test_weight_norm_refuses_an_unknown_implementation():
    with pytest.raises(
        ValueError,
        match="implementation must be None, 'reference', 'xla', 'native' or 'pallas': got 'cudnn'",
    ):
        jn.weight_norm(np.ones((2, 3), np.float32), implementation="cudnn")


INTEGERS = {"NumPy's": np.int64, "of an array": np.array, "JAX's": jnp.asarray}


@pytest.mark.parametrize("make", INTEGERS.values(), ids=INTEGERS)
def test_integers_may_be_of_numpy_and_jax(make, rng):
    k = kernel(rng)
    np.testing.assert_array_equal(jn.weight_norm(k, feature_axes=make(-1)), jn.weight_norm(k))
    np.testing.assert_array_equal(
        jn.spectral_norm(k, U, n_steps=make(2))[0], jn.spectral_norm(k, U, n_steps=2)[0]
    )
    x, layer = np.ones((1, 5), np.float32), flax.linen.Dense(3)
    ours, theirs = linen.WeightNorm(layer, feature_axes=make(-1)), flax.linen.WeightNorm(layer)
    np.testing.assert_allclose(
        *(norm.init_with_output(jax.random.key(0), x)[0] for norm in (ours, theirs)), rtol=1e-6
    )
    nnx.GroupNorm(6, num_groups=make(2), rngs=flax_nnx.Rngs(0))


def test_feature_axes_in_an_array(rng):
    k = kernel(rng, shape=(3, 3, 4, 3))
    np.testing.assert_array_equal(
        jn.weight_norm(k, feature_axes=np.array([2, 3])), jn.weight_norm(k, feature_axes=(2, 3))
    )
    np.testing.assert_array_equal(
        jn.weight_norm(k, feature_axes=np.array([], int)), jn.weight_norm(k, feature_axes=())
    )
