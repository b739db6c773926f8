"""Norms of another layer's parameters: weight norm and spectral norm."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxnorm.arguments.dtypes import promoted
from jaxnorm.norms.kernels import path_name
from jaxnorm.norms.weights import kernel_features, spectral_norm, weight_norm


class WeightNorm(nn.WeightNorm):
    """Weight normalization (Salimans & Kingma 2016, arXiv 1602.07868) of a wrapped layer.

    ``w / sqrt(sum(w**2) + epsilon) * scale`` replaces every weight w whose path contains a word of
    ``variable_filter``. The sum runs over all axes except ``feature_axes``. The scale is the
    parameter ``<layer>/<path>/scale`` and has the shape of the feature axes. A subclass of
    :class:`flax.linen.WeightNorm`.

    Attributes:
      layer_instance: the layer to call with normalized weights.
      epsilon: added to the sum of squares, inside the root; 1e-12 by default.
      dtype: dtype of the normalized weights; by default the dtype to which weight and scale
        promote.
      param_dtype: dtype of the scale; float32 by default.
      use_scale: whether to multiply by a learned scale; True by default.
      scale_init: initializer of the scale; ones by default.
      feature_axes: the axes of a weight that are not reduced; the last axis by default. None
        reduces all axes.
      variable_filter: words to look for in the paths of the parameters; ``{"kernel"}`` by default.
        None or an empty collection takes all parameters.

    >>> import flax.linen, jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm = nn.WeightNorm(flax.linen.Dense(1, kernel_init=flax.linen.initializers.ones))
    >>> norm.init_with_output(jax.random.key(0), jnp.array([[2.0, 0.0, 0.0, 0.0]]))[0].tolist()
    [[1.0]]
    """

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Call the layer with normalized weights.

        Args:
          *args: positional arguments of the layer.
          **kwargs: keyword arguments of the layer.

        Returns:
          The output of the layer.
        """
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
    """Spectral normalization (Miyato et al. 2018, arXiv 1802.05957) of a wrapped layer.

    ``w / sigma`` replaces every weight w of rank 2 or more. The last axis is the output; the other
    axes are flattened. Sigma is the largest singular value, estimated by power iteration. The
    vector of the iteration, of shape ``(1, out)``, is stored as ``u`` in ``collection_name``, next
    to ``sigma``. A subclass of :class:`flax.linen.SpectralNorm`.

    Attributes:
      layer_instance: the layer to call with normalized weights.
      n_steps: the number of power iterations in each call; 1 by default. Below 1 the weights stay
        as they are.
      epsilon: added to sums of squares in the iteration; 1e-12 by default.
      dtype: dtype of the normalized weights; by default the dtype to which weight and ``u``
        promote.
      param_dtype: dtype in which ``u`` and ``sigma`` are created; float32 by default.
      error_on_non_matrix: whether a weight of rank 3 or more raises ``ValueError``; False by
        default.
      collection_name: the collection that holds ``u`` and ``sigma``; ``"batch_stats"`` by default.

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
        """Call the layer with normalized weights.

        Args:
          *args: positional arguments of the layer.
          update_stats: whether to store the new ``u`` and ``sigma``: True in training. The
            collection must then be mutable.
          **kwargs: keyword arguments of the layer.

        Returns:
          The output of the layer.
        """

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
        # apply() of a trained model need not have an rng, so a key is drawn for a new
        # vector only.
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
        # Flax iterates in the dtype to which weight and vector promote.
        wide = value.astype(promoted(None, value, u.value))
        kernel, new_u, new_sigma = spectral_norm(
            wide, u.value, n_steps=self.n_steps, epsilon=self.epsilon
        )
        if update_stats:
            # Flax stores them in this dtype too, whatever their dtype was before.
            u.value, sigma.value = new_u.astype(wide.dtype), new_sigma.astype(wide.dtype)
        return kernel.astype(promoted(self.dtype, wide))


def _call_with(module: nn.Module, transform, args: tuple, kwargs: dict[str, Any], **options):
    """Call ``module.layer_instance`` with parameters replaced by ``transform(path, value)``."""

    def trans_in(variables):
        def leaf(path, value):
            # A kernel in a box of metadata has the path kernel/value.
            name = path_name(path[1:])
            return transform(f"{module.layer_instance.name}/{name}", jnp.asarray(value))

        return jax.tree_util.tree_map_with_path(leaf, variables)

    # While the model is initialized, the layer must create its parameters before they
    # are mapped.
    call = nn.map_variables(
        lambda layer: layer(*args, **kwargs),
        trans_in_fn=trans_in,
        init=module.is_initializing(),
        **options,
    )
    return call(module.layer_instance)
