"""Norms of another layer's parameters: weight norm and spectral norm.

A call puts normalized values into the layer's variables, and puts the old values back afterwards.
Training and saving therefore always see the layer's own parameters. Flax's constructors make all
other state of the modules.
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
    """Hold ``transform(path, value)`` in every parameter of ``layer`` while open."""
    before = []
    try:
        for path, param in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
            value = param[...]
            before.append((param, value))
            # Replaced whole, not by index: a bfloat16 weight may be float32 during the
            # call.
            set_value(param, transform(path, value))
        yield
    finally:
        for param, value in before:
            set_value(param, value)


class WeightNorm(flax_versions.WeightNorm):
    """Weight normalization (Salimans & Kingma 2016, arXiv 1602.07868) of a wrapped layer.

    ``w / sqrt(sum(w**2) + epsilon) * scale`` replaces every parameter w that passes
    ``variable_filter``. The sum runs over all axes except ``feature_axes``. The scales are
    ``scales[path]`` and have the shape of the feature axes. A subclass of
    :class:`flax.nnx.WeightNorm`.

    The installed Flax decides the type of the scales. In newer versions they are ``nnx.Param``. In
    older ones (0.12.8) they are plain arrays, which ``nnx.grad`` and ``nnx.Optimizer`` leave alone.
    To train them with any version, name them:
    ``trained = nnx.Any(nnx.Param, nnx.PathContains("scales"))``, then
    ``nnx.grad(loss, argnums=nnx.DiffState(0, trained))`` and
    ``nnx.Optimizer(model, tx, wrt=trained)``.

    Args:
      layer_instance: the layer to call with normalized weights.
      feature_axes: the axes of a weight that are not reduced; the last axis by default. None
        reduces all axes.
      use_scale: whether to multiply by a learned scale; True by default.
      scale_init: initializer of the scales; ones by default.
      epsilon: added to the sum of squares, inside the root; 1e-12 by default.
      dtype: dtype of the normalized weights; by default the dtype to which weight and scale
        promote.
      param_dtype: dtype for the scales, which Flax 0.12.8 stores but does not use; float32 by
        default.
      variable_filter: filter for the parameters to normalize; ``nnx.PathContains("kernel")`` by
        default.
      promote_dtype: has no effect; accepted because Flax has it.
      rngs: random number generators for the initializer.

    >>> import jax, jax.numpy as jnp
    >>> from flax.nnx import Linear, Rngs
    >>> from jaxnorm import nnx
    >>> layer = Linear(4, 1, kernel_init=jax.nn.initializers.ones, rngs=Rngs(0))
    >>> y = nnx.WeightNorm(layer, rngs=Rngs(0))(jnp.array([[2.0, 0.0, 0.0, 0.0]]))
    >>> y.tolist(), float(layer.kernel[0, 0])
    ([[1.0]], 1.0)
    """

    def _normalized(self, path: tuple, value: jax.Array) -> jax.Array:
        # Filters of nnx may ask for the type of the variable, so the value comes in
        # one.
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
        """Call the layer with normalized weights.

        Args:
          x: the input of the layer.
          *args: further positional arguments of the layer.
          **kwargs: keyword arguments of the layer.

        Returns:
          The output of the layer.
        """
        with _replaced(self.layer_instance, self._normalized):
            return self.layer_instance(x, *args, **kwargs)


class SpectralNorm(flax_versions.SpectralNorm):
    """Spectral normalization (Miyato et al. 2018, arXiv 1802.05957) of a wrapped layer.

    ``w / sigma`` replaces every parameter w of rank 2 or more. The last axis is the output; the
    other axes are flattened. Sigma is the largest singular value, estimated by power iteration. A
    subclass of :class:`flax.nnx.SpectralNorm`.

    In training each call takes ``n_steps`` of the power iteration and stores its vector ``u`` and
    ``sigma`` in ``batch_stats``. After ``.eval()``, and with ``update_stats=False``, they do not
    change.

    Args:
      layer_instance: the layer to call with normalized weights.
      n_steps: the number of power iterations in each call; 1 by default. Below 1 the weights stay
        as they are.
      epsilon: added to sums of squares in the iteration; 1e-12 by default.
      dtype: dtype to which normalized weights are rounded; by default they are not. The layer then
        gets them in the dtype of its parameter.
      param_dtype: dtype of ``u`` and ``sigma``; float32 by default.
      error_on_non_matrix: whether a parameter of rank 3 or more raises ``ValueError``; False by
        default.
      update_stats: whether calls store new values of ``u`` and ``sigma``; True by default.
        ``.train()`` and ``.eval()`` set it.
      rngs: random number generators for the first ``u``.

    >>> import jax, jax.numpy as jnp
    >>> from flax.nnx import Linear, Rngs
    >>> from jaxnorm import nnx
    >>> layer = Linear(4, 1, kernel_init=jax.nn.initializers.ones, rngs=Rngs(0))
    >>> nnx.SpectralNorm(layer, rngs=Rngs(0))(jnp.array([[2.0, 0.0, 0.0, 0.0]])).round(3).tolist()
    [[1.0]]
    """

    def __call__(self, x: jax.Array, update_stats: bool | None = None, **kwargs: Any) -> jax.Array:
        """Call the layer with normalized weights.

        Args:
          x: the input of the layer.
          update_stats: whether to store the new ``u`` and ``sigma``; None, the default, leaves the
            choice to the mode.
          **kwargs: keyword arguments of the layer.

        Returns:
          The output of the layer.
        """
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
            # Flax iterates in the dtype to which weight and vector promote.
            wide = value.astype(promoted(None, value, u[...]))
            kernel, new_u, new_sigma = spectral_norm(
                wide, u[...], n_steps=self.n_steps, epsilon=self.epsilon
            )
            if update:
                u[...], sigma[...] = (
                    new_u.astype(u.dtype),
                    jax.lax.stop_gradient(new_sigma).astype(sigma.dtype),
                )
            # The variable of the layer must keep its dtype.
            return kernel.astype(promoted(self.dtype, wide)).astype(value.dtype)

        with _replaced(self.layer_instance, normalized):
            return self.layer_instance(x, **kwargs)
