"""Norms of another layer's parameters: weight norm and spectral norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxnorm.arguments.dtypes import promoted
from jaxnorm.norms.weights import kernel_features, spectral_norm, weight_norm


class WeightNorm(nn.WeightNorm):
    """Calls a layer with its weights normalized (Salimans & Kingma 2016, arXiv 1602.07868), a
    :class:`flax.linen.WeightNorm`.

    ``w / sqrt(sum(w**2) + epsilon) * scale``, the sum over all axes but ``feature_axes``, for every
    parameter of ``layer_instance`` whose path contains a word of ``variable_filter``;
    ``<layer>/<path>/scale`` is learned, of the shape of the feature axes.

    >>> import flax.linen, jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.WeightNorm(flax.linen.Dense(1, kernel_init=flax.linen.initializers.ones))
    >>> norm.init_with_output(jax.random.key(0), jnp.array([[2.0, 0.0, 0.0, 0.0]]))[0].tolist()
    [[1.0]]
    """

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Calls the layer with these arguments."""
        return _call_with(self, self._normalized, args, kwargs)

    def _normalized(self, path: str, value: jax.Array) -> jax.Array:
        if self.variable_filter and not any(word in path for word in self.variable_filter):
            return value
        features = kernel_features(self.feature_axes, value.ndim)
        sizes = tuple(value.shape[axis] for axis in features)
        scale = (
            self.param(f"{path}/scale", self.scale_init, sizes, self.param_dtype)
            if self.use_scale
            else None
        )
        return weight_norm(
            value,
            scale,
            feature_axes=features,
            epsilon=self.epsilon,
            dtype=promoted(self.dtype, value, scale),
        )


class SpectralNorm(nn.SpectralNorm):
    """Calls a layer with its weights divided by their largest singular value, a
    :class:`flax.linen.SpectralNorm`.

    ``w / sigma``, sigma by power iteration (Miyato et al. 2018, arXiv 1802.05957), for every
    parameter of rank 2 or more, whose last axis is the output. ``update_stats`` stores the vector
    of the iteration, ``(1, out)``, in ``collection_name``.

    >>> import flax.linen, jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.SpectralNorm(flax.linen.Dense(1, kernel_init=flax.linen.initializers.ones))
    >>> x = jnp.array([[2.0, 0.0, 0.0, 0.0]])
    >>> y, _ = norm.init_with_output(jax.random.key(0), x, update_stats=False)
    >>> y.round(3).tolist()
    [[1.0]]
    """

    @nn.compact
    def __call__(self, *args: Any, update_stats: bool, **kwargs: Any) -> jax.Array:
        """Calls the layer with these arguments."""

        def normalized(path: str, value: jax.Array) -> jax.Array:
            return self._normalized(path, value, update_stats)

        return _call_with(self, normalized, args, kwargs, mutable=True)

    def _normalized(self, path: str, value: jax.Array, update_stats: bool) -> jax.Array:
        if value.ndim < 2 or self.n_steps < 1:
            return value
        if value.ndim > 2 and self.error_on_non_matrix:
            raise ValueError(
                f"Input is {value.ndim}D but error_on_non_matrix is True: {path} has shape "
                f"{value.shape}."
            )
        missing = not self.has_variable(self.collection_name, f"{path}/u")
        key = self.make_rng("params") if missing else None
        u = self.variable(
            self.collection_name,
            f"{path}/u",
            jax.random.normal,
            key,
            (1, value.shape[-1]),
            self.param_dtype,
        )
        sigma = self.variable(self.collection_name, f"{path}/sigma", jnp.ones, (), self.param_dtype)
        wide = value.astype(promoted(None, value, u.value))
        kernel, new_u, new_sigma = spectral_norm(
            wide, u.value, n_steps=self.n_steps, epsilon=self.epsilon
        )
        if update_stats:
            # as Flax, whatever they were before
            u.value, sigma.value = new_u.astype(wide.dtype), new_sigma.astype(wide.dtype)
        return kernel.astype(promoted(self.dtype, wide))


def _call_with(module: nn.Module, transform, args: tuple, kwargs: dict[str, Any], **options):
    """Calls ``module.layer_instance``, its parameters replaced by ``transform(path, value)``."""

    def trans_in(variables):
        def leaf(path, value):
            # kernel/value of a kernel in a box of metadata
            name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
            return transform(f"{module.layer_instance.name}/{name}", jnp.asarray(value))

        return jax.tree_util.tree_map_with_path(leaf, variables)

    call = nn.map_variables(
        lambda layer: layer(*args, **kwargs),
        trans_in_fn=trans_in,
        init=module.is_initializing(),
        **options,
    )
    return call(module.layer_instance)
