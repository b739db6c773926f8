"""The same norms elsewhere: each peer is ``norm name -> f(x, scale, bias)`` with epsilon 1e-5,
channels last.

Scale and bias are ``(channels,)``; RMS norm takes no bias anywhere.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxnorm as jn
from jaxnorm.core import plan

EPSILON = 1e-5
GROUPS = 32
Norms = dict[str, Callable]


def ours() -> Norms:
    """Those with statistics of their own take ``where`` too."""
    equal = jnp.zeros(3)
    return {
        "layer": lambda x, scale, bias, **mask: jn.layer_norm(
            x, scale=scale, bias=bias, epsilon=EPSILON, **mask
        ),
        "rms": lambda x, scale, bias, **mask: jn.rms_norm(x, scale=scale, epsilon=EPSILON, **mask),
        "batch": lambda x, scale, bias, **mask: jn.batch_norm(
            x, scale=scale, bias=bias, epsilon=EPSILON, **mask
        )[0],
        "instance": lambda x, scale, bias, **mask: jn.instance_norm(
            x, scale=scale, bias=bias, epsilon=EPSILON, **mask
        ),
        "group": lambda x, scale, bias, **mask: jn.group_norm(
            x, GROUPS, scale=scale, bias=bias, epsilon=EPSILON, **mask
        ),
        "switchable": lambda x, scale, bias: jn.switchable_norm(
            x, equal, equal, scale=scale, bias=bias, epsilon=EPSILON
        )[0],
    }


@contextmanager
def wished(implementation: str | None) -> Iterator[None]:
    """Within it, calls that are made, or traced, take this implementation, wherever they can; None
    selects as usual.
    """
    before = os.environ.pop(plan.VARIABLE, None)
    if implementation is not None:
        os.environ[plan.VARIABLE] = implementation
    try:
        yield
    finally:
        os.environ.pop(plan.VARIABLE, None)
        if before is not None:
            os.environ[plan.VARIABLE] = before


def ours_by(implementation: str) -> Norms:
    """The same by the implementation of this name."""

    def by(norm):
        def call(*arguments, **mask):
            with wished(implementation):
                return norm(*arguments, **mask)

        return call

    return {name: by(norm) for name, norm in ours().items()}


def flax_linen(fast: bool) -> Norms:
    def call(module, **options):
        module = module(epsilon=EPSILON, use_fast_variance=fast, **options)

        def norm(x, scale, bias, where=None):
            if where is not None and "num_groups" in options:
                where = jnp.broadcast_to(where, x.shape)  # which Flax splits into groups
            stats = {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}
            variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
            return module.apply(variables, x, mask=where, mutable=["batch_stats"])[0]

        return norm

    return {
        "layer": call(nn.LayerNorm),
        "rms": call(nn.RMSNorm),
        "batch": call(nn.BatchNorm, use_running_average=False),
        "instance": call(nn.InstanceNorm),
        "group": call(nn.GroupNorm, num_groups=GROUPS),
    }


def flax_nnx() -> Norms:
    def call(module, **options):
        def norm(x, scale, bias):
            layer = module(x.shape[-1], epsilon=EPSILON, rngs=nnx.Rngs(0), **options)
            layer.scale = nnx.Param(scale)
            if module is not nnx.RMSNorm:
                layer.bias = nnx.Param(bias)
            return layer(x)

        return norm

    return {
        "layer": call(nnx.LayerNorm),
        "rms": call(nnx.RMSNorm),
        "batch": call(nnx.BatchNorm, use_running_average=False),
        "instance": call(nnx.InstanceNorm),
        "group": call(nnx.GroupNorm, num_groups=GROUPS),
    }


def _over(standardize) -> Norms:
    return {
        "layer": lambda x, scale, bias: standardize(x, (-1,)) * scale + bias,
        "batch": lambda x, scale, bias: standardize(x, tuple(range(x.ndim - 1))) * scale + bias,
        "instance": lambda x, scale, bias: standardize(x, (1, 2)) * scale + bias,
    }


def plain_two_pass() -> Norms:
    def standardize(x, axes):
        centered = x - x.mean(axes, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(axes, keepdims=True) + EPSILON)

    return _over(standardize)


def jax_nn() -> Norms:
    return _over(lambda x, axes: jax.nn.standardize(x, axes, epsilon=EPSILON))


def haiku() -> Norms:
    import haiku as hk

    def call(make, **options):
        def norm(x, scale, bias):
            function = hk.transform_with_state(
                lambda x: make()(x, **options, scale=scale, offset=bias)
            )
            return function.apply(*function.init(jax.random.key(0), x), None, x)[0]

        return norm

    def rms(x, scale, bias):
        function = hk.transform(lambda x: hk.RMSNorm(-1, eps=EPSILON)(x))
        return function.apply({"rms_norm": {"scale": scale}}, None, x)

    return {
        "layer": call(lambda: hk.LayerNorm(-1, False, False, eps=EPSILON)),
        "rms": rms,
        "batch": call(lambda: hk.BatchNorm(False, False, 0.99, eps=EPSILON), is_training=True),
        "instance": call(lambda: hk.InstanceNorm(False, False, eps=EPSILON)),
        "group": call(
            lambda: hk.GroupNorm(GROUPS, create_scale=False, create_offset=False, eps=EPSILON)
        ),
    }


def equinox() -> Norms:
    """Of channels first: group norm pays for the layout."""
    import equinox as eqx

    def group(x, scale, bias):
        norm = eqx.tree_at(
            lambda m: (m.weight, m.bias),
            eqx.nn.GroupNorm(GROUPS, x.shape[-1], eps=EPSILON),
            (scale, bias),
        )
        return jnp.moveaxis(jax.vmap(norm)(jnp.moveaxis(x, -1, 1)), 1, -1)

    def each_row(kind, where, **options):
        def norm(x, *params):
            layer = eqx.tree_at(
                where, kind(x.shape[-1], EPSILON, **options), params[: len(where(kind(1)))]
            )
            return jax.vmap(layer)(x.reshape(-1, x.shape[-1])).reshape(x.shape)

        return norm

    return {
        "layer": each_row(eqx.nn.LayerNorm, lambda m: (m.weight, m.bias)),
        "rms": each_row(eqx.nn.RMSNorm, lambda m: (m.weight,), use_bias=False),
        "group": group,
    }


def keras_jax() -> Norms:
    import keras

    def call(make, **options):
        def norm(x, *params):
            layer = make()
            layer.build(x.shape)
            state = [variable.value for variable in layer.non_trainable_variables]
            return layer.stateless_call(
                params[: len(layer.trainable_variables)], state, x, **options
            )[0]

        return norm

    return {
        "layer": call(lambda: keras.layers.LayerNormalization(epsilon=EPSILON)),
        "rms": call(lambda: keras.layers.RMSNormalization(epsilon=EPSILON)),
        "batch": call(lambda: keras.layers.BatchNormalization(epsilon=EPSILON), training=True),
        "group": call(lambda: keras.layers.GroupNormalization(GROUPS, epsilon=EPSILON)),
    }


def torch_cpu() -> Norms:
    """Functions of tensors."""
    import torch.nn.functional as F

    def channels_first(norm):
        return lambda x, scale, bias: norm(x.movedim(-1, 1), scale, bias).movedim(1, -1)

    return {
        "layer": lambda x, scale, bias: F.layer_norm(x, x.shape[-1:], scale, bias, eps=EPSILON),
        "rms": lambda x, scale, bias: F.rms_norm(x, x.shape[-1:], scale, eps=EPSILON),
        "batch": channels_first(
            lambda x, scale, bias: F.batch_norm(
                x, None, None, scale, bias, training=True, eps=EPSILON
            )
        ),
        "instance": channels_first(
            lambda x, scale, bias: F.instance_norm(x, weight=scale, bias=bias, eps=EPSILON)
        ),
        "group": channels_first(
            lambda x, scale, bias: F.group_norm(x, GROUPS, scale, bias, eps=EPSILON)
        ),
    }


JAX_PEERS: dict[str, Callable[[], Norms]] = {
    "jaxnorm": ours,
    "jaxnorm, plain JAX": lambda: ours_by("xla"),
    "flax": lambda: flax_linen(True),
    "flax, two passes": lambda: flax_linen(False),
    "flax nnx": flax_nnx,
    "plain two passes": plain_two_pass,
    "jax.nn": jax_nn,
    "haiku": haiku,
    "equinox": equinox,
    "keras": keras_jax,
}
# peers named as their packages, which need not be there
OTHERS = ("haiku", "equinox", "keras", "torch")


def installed(peer: str) -> bool:
    return peer not in OTHERS or importlib.util.find_spec(peer) is not None
