"""The same norms elsewhere: each peer is ``norm name -> f(x)`` with epsilon 1e-5, no scale, no bias, channels last."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import numpy as np
import torch
import torch.nn.functional as F

import jaxnorm as jn

EPSILON = 1e-5
GROUPS = 8
KEY = jax.random.key(0)


def ours():
    equal = jnp.zeros(3)
    return {
        "layer": lambda x: jn.layer_norm(x, epsilon=EPSILON),
        "rms": lambda x: jn.rms_norm(x, epsilon=EPSILON),
        "batch": lambda x: jn.batch_norm(x, epsilon=EPSILON)[0],
        "instance": lambda x: jn.instance_norm(x, epsilon=EPSILON),
        "group": lambda x: jn.group_norm(x, GROUPS, epsilon=EPSILON),
        "switchable": lambda x: jn.switchable_norm(x, equal, equal, epsilon=EPSILON)[0],
    }


def flax(fast: bool):
    def call(module, **options):
        module = module(epsilon=EPSILON, use_fast_variance=fast, **options)
        return lambda x: module.apply(module.init(KEY, x), x, mutable=["batch_stats"])[0]

    return {
        "layer": call(nn.LayerNorm),
        "rms": call(nn.RMSNorm),
        "batch": call(nn.BatchNorm, use_running_average=False),
        "instance": call(nn.InstanceNorm),
        "group": call(nn.GroupNorm, num_groups=GROUPS),
    }


def plain_two_pass():
    def over(axes):
        def norm(x):
            centered = x - x.mean(axes, keepdims=True)
            return centered * jax.lax.rsqrt((centered**2).mean(axes, keepdims=True) + EPSILON)

        return norm

    return {"layer": over(-1), "batch": over((0, 1, 2)), "instance": over((1, 2))}


def haiku():
    def call(make):
        function = hk.transform_with_state(make)
        return lambda x: function.apply(*function.init(KEY, x), None, x)[0]

    return {
        "layer": call(lambda x: hk.LayerNorm(-1, False, False, eps=EPSILON)(x)),
        "rms": call(lambda x: hk.RMSNorm(-1, eps=EPSILON, create_scale=False)(x)),
        "batch": call(lambda x: hk.BatchNorm(False, False, 0.99, eps=EPSILON)(x, True)),
        "instance": call(lambda x: hk.InstanceNorm(False, False, eps=EPSILON)(x)),
        "group": call(lambda x: hk.GroupNorm(GROUPS, create_scale=False, create_offset=False, eps=EPSILON)(x)),
    }


def equinox():
    def group(x):
        norm = eqx.nn.GroupNorm(GROUPS, channelwise_affine=False, eps=EPSILON)
        return jnp.moveaxis(jax.vmap(norm)(jnp.moveaxis(x, -1, 1)), 1, -1)

    def each_row(make):
        return lambda x: jax.vmap(jax.vmap(jax.vmap(make(x.shape[-1]))))(x)

    return {
        "layer": each_row(lambda n: eqx.nn.LayerNorm(n, EPSILON, use_weight=False, use_bias=False)),
        "rms": each_row(lambda n: eqx.nn.RMSNorm(n, EPSILON, use_weight=False, use_bias=False)),
        "group": group,
    }


def keras_jax():
    def call(make):
        def norm(x):
            layer = make()
            layer.build(x.shape)
            values = [[variable.value for variable in group] for group in (layer.trainable_variables, layer.non_trainable_variables)]
            return layer.stateless_call(*values, x, **({"training": True} if "Batch" in type(layer).__name__ else {}))[0]

        return norm

    return {
        "layer": call(lambda: keras.layers.LayerNormalization(epsilon=EPSILON)),
        "rms": call(lambda: keras.layers.RMSNormalization(epsilon=EPSILON)),
        "batch": call(lambda: keras.layers.BatchNormalization(epsilon=EPSILON)),
        "group": call(lambda: keras.layers.GroupNormalization(GROUPS, epsilon=EPSILON)),
    }


def torch_cpu():
    """PyTorch functions, as functions of a tensor."""

    def channels_first(norm):
        return lambda x: norm(x.movedim(-1, 1)).movedim(1, -1)

    return {
        "layer": lambda x: F.layer_norm(x, x.shape[-1:], eps=EPSILON),
        "rms": lambda x: F.rms_norm(x, x.shape[-1:], eps=EPSILON),
        "batch": channels_first(lambda x: F.batch_norm(x, None, None, training=True, eps=EPSILON)),
        "instance": channels_first(lambda x: F.instance_norm(x, eps=EPSILON)),
        "group": channels_first(lambda x: F.group_norm(x, GROUPS, eps=EPSILON)),
    }


def with_jax(norm):
    """Output and gradient of a JAX function."""

    def run(x, cotangent):
        y, pullback = jax.vjp(norm, jnp.asarray(x))
        return np.asarray(y), np.asarray(pullback(jnp.asarray(cotangent))[0])

    return run


def with_torch(norm):
    """Output and gradient of a PyTorch function."""

    def run(x, cotangent):
        x = torch.tensor(x, requires_grad=True)
        y = norm(x)
        y.backward(torch.tensor(cotangent))
        return y.detach().numpy(), x.grad.numpy()

    return run


def all_peers():
    jax_peers = {
        "jaxnorm": ours(),
        "flax (default)": flax(True),
        "flax (two passes)": flax(False),
        "plain two-pass": plain_two_pass(),
        "haiku": haiku(),
        "equinox": equinox(),
        "keras (jax)": keras_jax(),
    }
    runs = {peer: {name: with_jax(norm) for name, norm in norms.items()} for peer, norms in jax_peers.items()}
    return runs | {"torch": {name: with_torch(norm) for name, norm in torch_cpu().items()}}
