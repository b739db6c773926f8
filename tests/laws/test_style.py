"""Test adaptive instance norm, whose scale and bias are the statistics of a style."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import long_sweep
from oracle import Part, oracle, worst

import jaxnorm as jn

SHAPE, STYLE, AXES = (3, 5, 6, 4), (3, 4, 3, 4), (1, 2)


def statistics(style, where=None, correction=0.0, epsilon=1e-5):
    """Deviation and mean in float64."""
    style = np.asarray(style, np.float64)
    w = np.broadcast_to(1.0 if where is None else where, style.shape).astype(np.float64)
    style = np.where(w > 0, style, 0)
    n = w.sum(AXES, keepdims=True)
    mean = (w * style).sum(AXES, keepdims=True) / np.maximum(n, 1e-300)
    squares = (w * (style - mean) ** 2).sum(AXES, keepdims=True)
    return np.sqrt(squares / np.maximum(n - correction, 1e-300) + epsilon), mean


def truth(x, style, where=None, style_where=None, cotangent=0.0, **options):
    scale, bias = statistics(style, style_where, **options)
    options = {"epsilon": 1e-5, **options}
    return oracle(
        x, (Part(AXES),), scale=scale, bias=bias, where=where, cotangent=cotangent, **options
    )


def draw(rng, shape, offset, dtype=np.float32):
    return (rng.standard_normal(shape) * 2 + offset).astype(dtype)


@pytest.mark.parametrize("correction", [0, 1])
@pytest.mark.parametrize("offset", long_sweep([0, 1e4, 1e6], quick=[1e6]))
def test_values_and_gradients(offset, correction, rng):
    """The style is masked by weights, and NaN lies beneath both masks."""
    x, style, dy = draw(rng, SHAPE, offset), draw(rng, STYLE, 3), draw(rng, SHAPE, 0)
    where = rng.random((*SHAPE[:3], 1)) < 0.7
    weights = np.where(rng.random((*STYLE[:3], 1)) < 0.7, 2.0, 0).astype(np.float32)
    given = np.where(where, x, np.nan), np.where(weights > 0, style, np.nan)

    def loss(x, style):
        options = {"where": where, "style_where": weights, "correction": correction}
        y = jn.ada_instance_norm(x, style, **options)
        return (y * dy).sum(), y

    (_, y), (dx, dstyle) = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*given)
    exact = truth(x, style, where, weights, dy, correction=correction)
    assert worst(y, exact.y, AXES) <= 1e-6
    assert worst(dx, exact.dx, AXES) <= 2e-6
    for found, mask in ((y, where), (dx, where), (dstyle, weights > 0)):
        assert not np.asarray(found)[np.broadcast_to(~mask, found.shape)].any()
    # the gradient by the style is that of its deviation s and its mean
    s, mean = statistics(style, weights, correction)
    n, live = weights.sum(AXES, keepdims=True, dtype=np.float64), weights.astype(np.float64)
    ds, dmean = (a.sum(AXES, keepdims=True) for a in (exact.dscale, exact.dbias))
    slope = ds * (style - mean) / s / (n - correction) + dmean / n
    assert worst(dstyle, live * slope, AXES) <= 2e-6


def test_the_style_of_a_batch_of_one_is_that_of_all(rng):
    x, style = draw(rng, SHAPE, 0), draw(rng, (1, 7, 2, 4), 3)
    y = jn.ada_instance_norm(x, style)
    np.testing.assert_allclose(y, jn.ada_instance_norm(x, np.repeat(style, 3, 0)), atol=1e-6)
    # its own style is no change, and the channels may lie anywhere
    np.testing.assert_allclose(jn.ada_instance_norm(x, x), x, atol=2e-6)
    first = jn.ada_instance_norm(x.swapaxes(1, 3), style.swapaxes(1, 3), feature_axes=1)
    np.testing.assert_allclose(first.swapaxes(1, 3), y, atol=1e-6)


def test_half_precision_is_rounded_once(rng):
    x, style = draw(rng, SHAPE, 100, jnp.bfloat16), draw(rng, STYLE, 3, jnp.float16)
    y = jn.ada_instance_norm(x, style)
    assert y.dtype == jnp.bfloat16
    exact = truth(x, style).y
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= 0.51 * spacing + 1e-5).all()
    assert jn.ada_instance_norm(x, style, dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("epsilon", long_sweep([0.0, 1e-5], quick=[0.0]))
@pytest.mark.parametrize("correction", long_sweep([0, 1], quick=[1]))
def test_styles_without_deviation_and_without_elements(epsilon, correction, rng):
    """Deviation sqrt(epsilon), and finite gradients; an empty style has mean 0."""
    x = jnp.asarray(draw(rng, (1, 6, 2), 0))
    options = {"epsilon": epsilon, "correction": correction}
    for style, mask, mean in (
        (jnp.full((1, 3, 2), 3.3), None, 3.3),
        (jnp.full((1, 1, 2), 3.3), None, 3.3),
        (jnp.full((1, 3, 2), jnp.nan), np.zeros((1, 3, 1), bool), 0),
        (jnp.zeros((1, 0, 2)), None, 0),
    ):
        run = lambda x, style, mask=mask: jn.ada_instance_norm(
            x, style, style_where=mask, **options
        )
        total = lambda x, style, run=run: (run(x, style).sum(), run(x, style))
        (_, y), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, style)
        np.testing.assert_allclose(y, np.float32(mean), atol=3 * epsilon**0.5)
        assert all(np.isfinite(leaf).all() for leaf in gradients)


def test_transformations(rng):
    x, style = draw(rng, (2, *SHAPE), 0), draw(rng, (2, *STYLE), 3)
    loop = np.stack([jn.ada_instance_norm(*pair) for pair in zip(x, style, strict=True)])
    np.testing.assert_allclose(jax.jit(jax.vmap(jn.ada_instance_norm))(x, style), loop, atol=1e-6)
    one, other = x[0], style[0]
    tangents = draw(rng, SHAPE, 0), draw(rng, STYLE, 0)
    y, forward = jax.jvp(jn.ada_instance_norm, (one, other), tangents)
    backward = jax.vjp(jn.ada_instance_norm, one, other)[1](jnp.ones_like(y))
    pairs = zip(backward, tangents, strict=True)
    np.testing.assert_allclose(forward.sum(), sum((a * b).sum() for a, b in pairs), rtol=1e-4)
    # over the parts of both arrays along an axis, as over the arrays
    parts = one.reshape(3, 5, 2, 3, 4).swapaxes(0, 2), other.reshape(3, 2, 2, 3, 4).swapaxes(0, 1)
    parts = (parts[0].swapaxes(1, 2), parts[1])
    run = jax.vmap(
        lambda x, style: jn.ada_instance_norm(x, style, axis_name="parts", correction=1),
        axis_name="parts",
    )
    whole = jn.ada_instance_norm(one, other, correction=1)
    found = run(*parts).swapaxes(1, 2).swapaxes(0, 2).reshape(SHAPE)
    np.testing.assert_allclose(found, whole, atol=2e-6)


WRONG = [
    ({"style": (3, 4, 4)}, "style must have as many axes as x, its channels, and its batch or one"),
    ({"style": (2, 4, 3, 4)}, r"got style of shape \(2, 4, 3, 4\) for x of shape \(3, 5, 6, 4\)\."),
    ({"style": (3, 4, 3, 5)}, r"got style of shape \(3, 4, 3, 5\)"),
    ({"x": (3, 4), "style": (3, 4)}, "adaptive instance norm must have an axis to reduce"),
    ({"feature_axes": 0}, "adaptive instance norm must leave axis 0 to the batch"),
    ({"epsilon": -1.0}, r"epsilon must be finite and >= 0: got -1\.0"),
    ({"correction": -1}, r"correction must be finite and >= 0: got -1\.0\. 0 divides by n"),
    ({"style_where": np.ones((3, 2, 3, 4), bool)}, "style_where must broadcast against style"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_errors(given, message):
    given = dict(given)
    x, style = (jnp.ones(given.pop(name, size)) for name, size in (("x", SHAPE), ("style", STYLE)))
    with pytest.raises(ValueError, match=message):
        jn.ada_instance_norm(x, style, **given)


def test_kinds_of_arguments():
    x, style = jnp.ones(SHAPE), jnp.ones(STYLE)
    with pytest.raises(TypeError, match=r"style must be floating point: got int32"):
        jn.ada_instance_norm(x, style.astype(int))
    with pytest.raises(TypeError, match=r"eps must be an argument .* Did you mean epsilon\?"):
        jn.ada_instance_norm(x, style, eps=1e-3)
    with pytest.raises(TypeError, match="takes x, style by position: got 3 such arguments"):
        jn.ada_instance_norm(x, style, -1)


def test_the_pytorch_code_in_wide_use(rng):
    """Of pytorch-AdaIN: torch.var, which is corrected, plus epsilon, of both arrays."""
    torch = pytest.importorskip("torch")
    x, style = draw(rng, SHAPE, 1), draw(rng, STYLE, 3)

    def parts(a):
        flat = torch.tensor(a).permute(0, 3, 1, 2).reshape(3, 4, -1)
        shape = (3, 4, 1, 1)
        return flat.mean(2).view(shape), (flat.var(2) + 1e-5).sqrt().view(shape)

    (mean, std), (new_mean, new_std) = parts(x), parts(style)
    theirs = (torch.tensor(x).permute(0, 3, 1, 2) - mean) / std * new_std + new_mean
    found = jn.ada_instance_norm(x, style, correction=1)
    np.testing.assert_allclose(found, theirs.permute(0, 2, 3, 1).numpy(), atol=3e-6)
