"""Norms of another layer's parameters: weight norm and spectral norm.

The layer is called with normalized values in its variables, which are then put back: what is
trained and saved is always the layer's own parameter. What else the modules hold is made by Flax's
own constructors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from jaxnorm.arguments.dtypes import promoted
from jaxnorm.nnx import flax_versions
from jaxnorm.nnx.flax_versions import set_value
from jaxnorm.norms.weights import spectral_norm, weight_norm


@contextmanager
def _replaced(
    layer: nnx.Module, transform: Callable[[tuple, jax.Array], jax.Array]
) -> Iterator[None]:
    """While open, every parameter of ``layer`` holds ``transform(path, value)``."""
    before = []
    try:
        for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
            value = param[...]
            before.append((param, value))
            set_value(param, transform(path, value))
        yield
    finally:
        for param, value in before:
            set_value(param, value)


class WeightNorm(flax_versions.WeightNorm):
    """Calls a layer with its weights normalized (Salimans & Kingma 2016, arXiv 1602.07868), a
    :class:`flax.nnx.WeightNorm`.

    ``w / sqrt(sum(w**2) + epsilon) * scale``, the sum over all axes but ``feature_axes``, for every
    parameter that passes ``variable_filter``. The scales are ``scales[path]``, of the shape of the
    feature axes, and what they are in the installed Flax: ``nnx.Param`` in newer versions, plain
    arrays in older ones (0.12.8), which ``nnx.grad`` and ``nnx.Optimizer`` leave alone. To train
    them with any version, name them: ``trained = nnx.Any(nnx.Param, nnx.PathContains("scales"))``,
    then ``nnx.grad(loss, argnums=nnx.DiffState(0, trained))`` and ``nnx.Optimizer(model, tx,
    wrt=trained)``.

    >>> import jax, jax.numpy as jnp
    >>> from flax.nnx import Linear, Rngs
    >>> from jaxnorm import nnx
    >>> layer = Linear(4, 1, kernel_init=jax.nn.initializers.ones, rngs=Rngs(0))
    >>> y = nnx.WeightNorm(layer, rngs=Rngs(0))(jnp.array([[2.0, 0.0, 0.0, 0.0]]))
    >>> y.tolist(), float(layer.kernel[0, 0])
    ([[1.0]], 1.0)
    """

    def _normalized(self, path: tuple, value: jax.Array) -> jax.Array:
        if not self.variable_filter(path, nnx.Param(value)):
            return value
        if self.scales is not None and path not in self.scales:
            raise ValueError(
                f"the parameters of the wrapped layer must not change: {path} has no scale. Wrap "
                "the layer anew."
            )
        scale = None if self.scales is None else self.scales[path][...]
        dtype = promoted(self.dtype, value, scale)
        return weight_norm(
            value, scale, feature_axes=self.feature_axes, epsilon=self.epsilon, dtype=dtype
        )

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Calls the layer with these arguments."""
        with _replaced(self.layer_instance, self._normalized):
            return self.layer_instance(x, *args, **kwargs)


class SpectralNorm(flax_versions.SpectralNorm):
    """Calls a layer with its weights divided by their largest singular value, a
    :class:`flax.nnx.SpectralNorm`.

    ``w / sigma``, sigma by power iteration (Miyato et al. 2018, arXiv 1802.05957), for every
    parameter of rank 2 or more, whose last axis is the output. In training each call takes
    ``n_steps`` of the power iteration, whose vectors are stored in ``batch_stats``; ``.eval()`` and
    ``update_stats=False`` leave them as they are.

    >>> import jax, jax.numpy as jnp
    >>> from flax.nnx import Linear, Rngs
    >>> from jaxnorm import nnx
    >>> layer = Linear(4, 1, kernel_init=jax.nn.initializers.ones, rngs=Rngs(0))
    >>> nnx.SpectralNorm(layer, rngs=Rngs(0))(jnp.array([[2.0, 0.0, 0.0, 0.0]])).round(3).tolist()
    [[1.0]]
    """

    def __call__(self, x: jax.Array, update_stats: bool | None = None, **kwargs: Any) -> jax.Array:
        """Calls the layer with ``x`` and these keywords."""
        update = not self.use_running_average if update_stats is None else update_stats

        def normalized(path: tuple, value: jax.Array) -> jax.Array:
            if value.ndim < 2 or self.n_steps < 1:
                return value
            if (*path, "u") not in self.batch_stats:
                raise ValueError(
                    f"the parameters of the wrapped layer must not change: {path} has no vector. "
                    "Wrap the layer anew."
                )
            u, sigma = self.batch_stats[(*path, "u")], self.batch_stats[(*path, "sigma")]
            wide = value.astype(promoted(None, value, u[...]))
            kernel, new_u, new_sigma = spectral_norm(
                wide, u[...], n_steps=self.n_steps, epsilon=self.epsilon
            )
            if update:
                u[...], sigma[...] = (
                    new_u.astype(u.dtype),
                    jax.lax.stop_gradient(new_sigma).astype(sigma.dtype),
                )
            # Flax's variables keep their dtypes
            return kernel.astype(promoted(self.dtype, wide)).astype(value.dtype)

        with _replaced(self.layer_instance, normalized):
            return self.layer_instance(x, **kwargs)
