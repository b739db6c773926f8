"""Test what papers and tutorials say of their norms, and what their frameworks print."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import MEAN_LOGITS, VAR_LOGITS, softmax

import jaxnorm as jn

PADDLE = """0.71878898 -1.20117974 -1.47859287 0.03959895 0.82640684 -0.56029880"""
PADDLE_LAST = """1.51780486 0.99067575 0.51224011"""


def test_paddle_documentation_example():
    """paddle.nn.LayerNorm(x.shape[1:]) of NumPy's seed 123: one gain and bias for each of 2 x 2 x 3
    elements.
    """
    np.random.seed(123)
    x = np.random.random((2, 2, 2, 3)).astype(np.float32)
    y = np.asarray(
        jn.layer_norm(
            x, axes=(1, 2, 3), scale=jnp.ones((2, 2, 3)), bias=jnp.zeros((2, 2, 3)), epsilon=1e-5
        )
    )
    np.testing.assert_allclose(y[0, 0].ravel(), np.array(PADDLE.split(), float), atol=4e-7)
    np.testing.assert_allclose(y[-1, -1, -1], np.array(PADDLE_LAST.split(), float), atol=4e-7)


@pytest.mark.parametrize("a", [0.25, 3.0, 64.0])
def test_batch_norm_does_not_see_the_scale_of_weights(a, rng, x64):
    """BN((aW)u) = BN(Wu), d BN((aW)u)/du = d BN(Wu)/du, d BN((aW)u)/d(aW) = (1/a) d BN(Wu)/dW
    (Ioffe & Szegedy 2015, 3.3).
    """
    weights, u = jnp.asarray(rng.standard_normal((5, 4))), jnp.asarray(rng.standard_normal((32, 5)))

    def norm(weights, u):
        return jn.batch_norm(u @ weights, epsilon=0.0)[0]

    np.testing.assert_allclose(norm(a * weights, u), norm(weights, u), atol=1e-12)
    cotangent = jnp.asarray(rng.standard_normal((32, 4)))
    dw, du = jax.vjp(norm, weights, u)[1](cotangent)
    dw_scaled, du_scaled = jax.vjp(norm, a * weights, u)[1](cotangent)
    np.testing.assert_allclose(du_scaled, du, atol=1e-12)
    np.testing.assert_allclose(dw_scaled, dw / a, atol=1e-12)


def test_batch_norm_in_training_and_with_population_statistics(rng):
    """Algorithms 1 and 2 of Ioffe & Szegedy: merging the Moments of all batches gives the
    population's.
    """
    x = rng.standard_normal((6, 32, 4)).astype(np.float32) * 3 + 2
    scale, bias = rng.standard_normal((2, 4)).astype(np.float32)
    outputs = [jn.batch_norm(part, scale=scale, bias=bias) for part in x]
    exact = x.astype(np.float64)
    for part, (y, _) in zip(exact, outputs, strict=True):
        truth = (part - part.mean(0)) / np.sqrt(part.var(0) + 1e-5) * scale + bias
        np.testing.assert_allclose(y, truth, atol=2e-6)
    population = jn.merge(*(found for _, found in outputs))
    joined = exact.reshape(-1, 4)
    truth = (exact[0] - joined.mean(0)) / np.sqrt(joined.var(0, ddof=1) + 1e-5) * scale + bias
    y = jn.normalize(
        x[0], population, scale=scale.reshape(1, 4), bias=bias.reshape(1, 4), correction=1
    )
    np.testing.assert_allclose(y, truth, atol=3e-6)


def test_layer_norm_does_not_see_the_scale_and_shift_of_weights(rng, x64):
    """Ba et al. 2016, table 1: re-scaling all weights and re-centering them, and re-scaling one
    example, change nothing.
    """
    weights, x = jnp.asarray(rng.standard_normal((5, 8))), jnp.asarray(rng.standard_normal((3, 5)))
    y = jn.layer_norm(x @ weights, epsilon=0.0)
    shift = jnp.asarray(rng.standard_normal((5, 1)))
    for other in ((2.5 * weights), (weights + shift)):
        np.testing.assert_allclose(jn.layer_norm(x @ other, epsilon=0.0), y, atol=1e-12)
    np.testing.assert_allclose(jn.layer_norm((7 * x) @ weights, epsilon=0.0), y, atol=1e-12)


def test_rms_norm_equation(rng):
    """Zhang & Sennrich 2019, eq. 4."""
    x, scale = (
        rng.standard_normal((3, 5)).astype(np.float32),
        rng.standard_normal(5).astype(np.float32),
    )
    truth = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * scale
    np.testing.assert_allclose(jn.rms_norm(x, scale=scale), truth, atol=1e-6)


def test_switchable_norm_equations(rng):
    """Luo et al. 2018, eqs. 3 and 4, statistics of each kind computed from the data."""
    x = (rng.standard_normal((4, 5, 6, 3)) * 2 + 1).astype(np.float32)
    exact, axes = x.astype(np.float64), ((1, 2), (1, 2, 3), (0, 1, 2))
    mean = sum(
        w * exact.mean(a, keepdims=True) for w, a in zip(softmax(MEAN_LOGITS), axes, strict=True)
    )
    var = sum(
        w * exact.var(a, keepdims=True) for w, a in zip(softmax(VAR_LOGITS), axes, strict=True)
    )
    y, batch = jn.switchable_norm(x, MEAN_LOGITS, VAR_LOGITS)
    np.testing.assert_allclose(y, (exact - mean) / np.sqrt(var + 1e-5), atol=2e-6)
    np.testing.assert_allclose(batch.mean[0, 0, 0], exact.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(batch.var[0, 0, 0], exact.var((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(
        jn.switchable_norm(x, MEAN_LOGITS, VAR_LOGITS, running=batch)[0], y, atol=1e-6
    )


BLENDED = [
    jn.instance_norm,
    partial(jn.layer_norm, axes=(1, 2, 3)),
    lambda x, epsilon: jn.batch_norm(x, epsilon=epsilon)[0],
]


@pytest.mark.parametrize(
    ("kind", "norm"), list(enumerate(BLENDED)), ids=["instance", "layer", "batch"]
)
def test_switchable_norm_contains_the_norms_it_blends(kind, norm, rng):
    x = rng.standard_normal((4, 5, 6, 3)).astype(np.float32)
    logits = np.where(np.arange(3) == kind, 60, 0).astype(np.float32)
    np.testing.assert_allclose(
        jn.switchable_norm(x, logits, logits, epsilon=1e-3)[0], norm(x, epsilon=1e-3), atol=1e-6
    )


def test_switchable_norm_trains_its_weights(rng):
    x = jnp.asarray(rng.standard_normal((4, 5, 6, 3)), jnp.float32)

    def loss(mean_logits, var_logits):
        return jnp.sin(jn.switchable_norm(x, mean_logits, var_logits)[0]).sum()

    found = jax.grad(loss, (0, 1))(jnp.asarray(MEAN_LOGITS), jnp.asarray(VAR_LOGITS))
    step = 1e-3
    for k, gradient in enumerate(found):
        for i in range(3):
            ends = []
            for sign in (1, -1):
                logits = [MEAN_LOGITS.copy(), VAR_LOGITS.copy()]
                logits[k][i] += sign * step
                ends.append(_switchable_loss(np.asarray(x, np.float64), *logits))
            np.testing.assert_allclose(gradient[i], (ends[0] - ends[1]) / (2 * step), atol=2e-3)


def _switchable_loss(x, mean_logits, var_logits):
    axes = ((1, 2), (1, 2, 3), (0, 1, 2))
    mean = sum(
        w * x.mean(a, keepdims=True) for w, a in zip(softmax(mean_logits), axes, strict=True)
    )
    var = sum(w * x.var(a, keepdims=True) for w, a in zip(softmax(var_logits), axes, strict=True))
    return np.sin((x - mean) / np.sqrt(var + 1e-5)).sum()


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("epsilon_in", ["var", "std", "max"])
def test_the_variants_of_the_listings(correction, epsilon_in, rng):
    """epsilon added to sigma instead of its square, or less than it, and the unbiased variance."""
    x = rng.standard_normal((3, 5)).astype(np.float32)
    exact = x.astype(np.float64)
    var = exact.var(1, ddof=correction, keepdims=True)
    roots = {"var": np.sqrt(var + 0.9), "std": np.sqrt(var) + 0.9, "max": np.sqrt(var).clip(0.9)}
    truth = (exact - exact.mean(1, keepdims=True)) / roots[epsilon_in]
    options = {"epsilon": 0.9, "correction": correction, "epsilon_in": epsilon_in}
    np.testing.assert_allclose(jn.layer_norm(x, **options), truth, atol=1e-6)
    np.testing.assert_allclose(jn.normalize(x, jn.moments(x, 1), **options), truth, atol=1e-6)
    constant = jax.grad(lambda x: jn.layer_norm(x, **options).sum())(jnp.ones((2, 5)))
    assert np.isfinite(constant).all()  # the root has an infinite slope at 0


ONE_OF_TWO, LITTLE_WEIGHT = ([[True, False]], False), ([[0.5, 0.25]], True)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    ("masked", "expected"),
    [(ONE_OF_TWO, [1e30, 0]), (LITTLE_WEIGHT, [-1e30, 1e30])],
    ids=["mask", "weights"],
)
def test_no_variance_has_no_gradient_whatever_the_gain(masked, expected, implementation):
    """Of one element, or of no more weight, whose variance is 0 whatever they are: dx = r (dy - w /
    n sum(dy)).
    """
    where, centered = masked
    options = {
        "centered": centered,
        "correction": 1,
        "epsilon": 1e-30,
        "epsilon_in": "std",
        "implementation": implementation,
    }
    norm = lambda x: jn.standardize(x, -1, where=jnp.asarray(where), **options)
    (dx,) = jax.vjp(norm, jnp.asarray([[2.0, 3.0]]))[1](jnp.asarray([[1.0, 2.0]]))
    np.testing.assert_allclose(dx[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("correction", "gain"), [(0, 2**-0.5), (1, 3**-0.5), (1.5, 5**-0.5), (2, 1), (3, 1)]
)
def test_a_correction_of_the_count_and_more_leaves_no_variance(correction, gain):
    """-1 and 1 over sqrt(2 / (2 - correction) + 1)."""
    x, weights, truth = (
        jnp.array([[1.0, 3.0, 7.0]]),
        jnp.array([[1.0, 1.0, 0.0]]),
        np.array([[-1, 1, 0]]) * gain,
    )
    options = {"epsilon": 1.0, "correction": correction}
    np.testing.assert_allclose(jn.standardize(x[:, :2], 1, **options), truth[:, :2], rtol=1e-6)
    np.testing.assert_allclose(jn.standardize(x, 1, where=weights, **options), truth, rtol=1e-6)
    np.testing.assert_allclose(
        jn.normalize(x[:, :2], jn.moments(x[:, :2], 1), **options), truth[:, :2], rtol=1e-6
    )


def test_one_element_and_correction_one():
    assert (np.asarray(jn.layer_norm(jnp.ones((2, 1)), correction=1)) == 0).all()
