"""Norms of another layer's parameters: weight norm and spectral norm.

The layer is called with normalized values in its variables, which are then put back: what is trained and saved is
always the layer's own parameter.
"""

from collections.abc import Callable
from contextlib import contextmanager

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn
from jax.nn import initializers

from jaxnorm.features import promoted
from jaxnorm.weights import kernel_features, spectral_norm, weight_norm


@contextmanager
def _replaced(layer: nnx.Module, transform: Callable[[tuple, jax.Array], jax.Array]):
    """While open, every parameter of ``layer`` holds ``transform(path, value)``."""
    before = []
    try:
        for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
            value = param[...]
            before.append((param, value))
            param[...] = transform(path, value)
        yield
    finally:
        for param, value in before:
            param[...] = value


class WeightNorm(nnx.Module):
    """Calls a layer with its weights normalized (Salimans & Kingma 2016), as :class:`flax.nnx.WeightNorm`.

    Every parameter that passes ``variable_filter`` has its features divided by their lengths and multiplied with a
    learned scale, ``scales[path]``.

    >>> import jax, jax.numpy as jnp
    >>> from flax.nnx import Linear, Rngs
    >>> from jaxnorm import nnx
    >>> layer = Linear(4, 1, kernel_init=jax.nn.initializers.ones, rngs=Rngs(0))
    >>> nnx.WeightNorm(layer, rngs=Rngs(0))(jnp.array([[2.0, 0.0, 0.0, 0.0]])).tolist(), float(layer.kernel[0, 0])
    ([[1.0]], 1.0)
    """

    def __init__(
        self,
        layer_instance: nnx.Module,
        *,
        feature_axes: Axes | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        variable_filter: nnx.filterlib.Filter = nnx.PathContains("kernel"),  # noqa: B008 immutable
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
    ):
        self.layer_instance = layer_instance
        self.feature_axes = () if feature_axes is None else feature_axes
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.variable_filter = nnx.filterlib.to_predicate(variable_filter)
        self.promote_dtype = promote_dtype
        scales = {}
        for path, param in nnx.to_flat_state(nnx.state(layer_instance, nnx.Param)):
            if use_scale and self.variable_filter(path, param):
                sizes = tuple(param.shape[axis] for axis in kernel_features(feature_axes, param.ndim))
                scales[path] = nnx.Param(scale_init(rngs.params(), sizes, param_dtype))
        self.scales = nnx.data(scales if use_scale else None)

    def _normalized(self, path: tuple, value: jax.Array) -> jax.Array:
        if not self.variable_filter(path, nnx.Param(value)):
            return value
        if self.scales is not None and path not in self.scales:
            raise ValueError(f"the parameters of the wrapped layer must not change: {path} has no scale. Wrap the layer anew.")
        scale = None if self.scales is None else self.scales[path][...]
        dtype = promoted(self.dtype, value, scale)
        return weight_norm(value, scale, feature_axes=self.feature_axes, epsilon=self.epsilon, dtype=dtype)

    def __call__(self, x: jax.Array, *args, **kwargs):
        """Calls the layer with these arguments."""
        with _replaced(self.layer_instance, self._normalized):
            return self.layer_instance(x, *args, **kwargs)


class SpectralNorm(nnx.Module):
    """Calls a layer with its weights divided by their largest singular value, as :class:`flax.nnx.SpectralNorm`.

    Miyato et al. 2018. In training each call takes ``n_steps`` of the power iteration, whose vectors are kept in
    ``batch_stats``; ``.eval()`` and ``update_stats=False`` leave them as they are.

    >>> import jax, jax.numpy as jnp
    >>> from flax.nnx import Linear, Rngs
    >>> from jaxnorm import nnx
    >>> layer = Linear(4, 1, kernel_init=jax.nn.initializers.ones, rngs=Rngs(0))
    >>> nnx.SpectralNorm(layer, rngs=Rngs(0))(jnp.array([[2.0, 0.0, 0.0, 0.0]])).round(3).tolist()
    [[1.0]]
    """

    def __init__(
        self,
        layer_instance: nnx.Module,
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: nnx.Rngs,
    ):
        self.layer_instance = layer_instance
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats  # what .train() and .eval() set
        batch_stats = {}
        for path, param in nnx.to_flat_state(nnx.state(layer_instance, nnx.Param)):
            if self._applies(path, param):
                u = initializers.normal()(rngs.params(), (1, param.shape[-1]), param_dtype)
                batch_stats[(*path, "u")] = nnx.BatchStat(u)
                batch_stats[(*path, "sigma")] = nnx.BatchStat(jnp.ones((), param_dtype))
        self.batch_stats = nnx.data(batch_stats)

    def _applies(self, path: tuple, value) -> bool:
        if value.ndim > 2 and self.error_on_non_matrix:
            raise ValueError(f"Input is {value.ndim}D but error_on_non_matrix is True: {path} has shape {value.shape}.")
        return value.ndim > 1 and self.n_steps >= 1

    def __call__(self, x: jax.Array, *args, update_stats: bool | None = None, **kwargs):
        """Calls the layer with these arguments."""
        update = not self.use_running_average if update_stats is None else update_stats

        def normalized(path: tuple, value: jax.Array) -> jax.Array:
            if not self._applies(path, value):
                return value
            if (*path, "u") not in self.batch_stats:
                raise ValueError(f"the parameters of the wrapped layer must not change: {path} has no vector. Wrap the layer anew.")
            u, sigma = self.batch_stats[(*path, "u")], self.batch_stats[(*path, "sigma")]
            kernel, new_u, new_sigma = spectral_norm(value, u[...], n_steps=self.n_steps, epsilon=self.epsilon)
            if update:
                u[...], sigma[...] = new_u, jax.lax.stop_gradient(new_sigma)
            return kernel.astype(promoted(self.dtype, value, new_u, new_sigma))

        with _replaced(self.layer_instance, normalized):
            return self.layer_instance(x, *args, **kwargs)
