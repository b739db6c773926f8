"""Blocks of models, by which norms are judged among the layers that they stand between.

A norm alone does not show what XLA makes of its neighbours: a residual, an activation or a cast
that is part of the same loop costs nothing, and a kernel takes no part in that loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

import jaxnorm as jn
from bench.peers import JAX_PEERS, Norms
from bench.targets import Target, asked_by, compiled, kernels_for
from bench.transfers import transferred

MIB = 2**20
Shape = tuple[int, ...]
Params = list[dict[str, Any]]  # of each part of a block: arrays, or their shapes


def mlp(p: dict, h: jax.Array) -> jax.Array:
    """Return gelu(h up) down."""
    return jax.nn.gelu(h @ p["up"]) @ p["down"]


def attention(p: dict, h: jax.Array) -> jax.Array:
    """Return the attention of h to itself, by heads of 64 features."""
    query, key, value = (
        (h @ p[name]).reshape(*h.shape[:-1], -1, 64) for name in ("query", "key", "value")
    )
    return jax.nn.dot_product_attention(query, key, value).reshape(h.shape) @ p["out"]


def pre_norm(layer: Callable, norms: Norms, params: Params, x: jax.Array) -> jax.Array:
    """Return x + layer(norm(x)), for one layer after another."""
    own = lambda p: (p["scale"], p["bias"])
    h = norms["layer"](x, *own(params[0])).astype(x.dtype)
    for p, following in pairwise(params):
        h, x = norms["add layer"](layer(p, h), x, *own(following))
        h = h.astype(x.dtype)
    return x + layer(params[-1], h)


def bottlenecks_of(norms: Norms, params: Params, x: jax.Array) -> jax.Array:
    """Return x after one bottleneck after another."""
    for p in params:
        x = bottleneck(norms["batch"], p, x)
    return x


def bottleneck(norm: Callable, p: dict, x: jax.Array) -> jax.Array:
    """Return relu(x + h), where h is x after three convolutions, each with a norm."""
    h = x
    for layer in (p["reduce"], p["middle"], p["expand"]):
        h = jax.lax.conv_general_dilated(
            h, layer["weight"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        h = norm(h, layer["scale"], layer["bias"]).astype(x.dtype)
        h = jax.nn.relu(h if layer is not p["expand"] else x + h)
    return h


def convolution(size: int, inputs: int, outputs: int) -> dict[str, Shape]:
    """Return the shapes of the parameters of a convolution and the norm after it."""
    return {"weight": (size, size, inputs, outputs), "scale": (outputs,), "bias": (outputs,)}


@dataclass(frozen=True)
class Block:
    """Layers one after another that a model repeats.

    Attributes:
      title: says what it is, and its sizes.
      run: ``run(norms, params, x)`` returns the output.
      x: the shape of the bfloat16 input.
      params: the shapes of the parameters of each.
    """

    title: str
    run: Callable[[Norms, Params, jax.Array], jax.Array]
    x: Shape
    params: Params

    def types(self, sharding: Sharding) -> tuple[Params, jax.ShapeDtypeStruct]:
        """Return those of params and x: bfloat16, but for scale and bias, which are float32."""

        def of(path, shape: Shape) -> jax.ShapeDtypeStruct:
            dtype = "float32" if path[-1].key in ("scale", "bias") else "bfloat16"
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        params = jax.tree_util.tree_map_with_path(
            of, self.params, is_leaf=lambda node: isinstance(node, tuple)
        )
        return params, jax.ShapeDtypeStruct(self.x, "bfloat16", sharding=sharding)


def named(x: Shape) -> str:
    return "x".join(map(str, x))


def mlps(x: Shape = (32, 1024, 1024), up: int = 2048) -> Block:
    """Return two pre-norm MLP halves of a transformer."""
    features = x[-1]
    half = {"scale": (features,), "bias": (features,), "up": (features, up), "down": (up, features)}
    title = f"two pre-norm MLP halves, {named(x)}, up {up}"
    return Block(title, partial(pre_norm, mlp), x, [half, half])


def attentions(x: Shape = (32, 1024, 1024)) -> Block:
    """Return the pre-norm attention half of a transformer."""
    features = x[-1]
    weights = dict.fromkeys(("query", "key", "value", "out"), (features, features))
    params: dict = {"scale": (features,), "bias": (features,), **weights}
    title = f"pre-norm attention, {named(x)}, heads of 64"
    return Block(title, partial(pre_norm, attention), x, [params])


def bottlenecks(x: Shape = (64, 56, 56, 256), inner: int = 64) -> Block:
    """Return two bottlenecks of a ResNet."""
    features = x[-1]
    parts = {
        "reduce": convolution(1, features, inner),
        "middle": convolution(3, inner, inner),
        "expand": convolution(1, inner, features),
    }
    title = f"two ResNet bottlenecks with batch norm, {named(x)}, inside {inner}"
    return Block(title, bottlenecks_of, x, [parts, parts])


BLOCKS = {"mlp": mlps(), "attention": attentions(), "bottleneck": bottlenecks()}


def without(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """Return x scaled and shifted, without a norm, rounded once as norms round."""
    return (x * scale + bias).astype(x.dtype)


def kinds(platform: str) -> dict[str, Norms]:
    """Return the norms to compare, by who has made them; ours twice where there are kernels."""
    peers = ("jaxnorm", "jaxnorm, plain JAX", "flax")
    own = peers if kernels_for(platform) else peers[1:]
    found: dict[str, Norms] = {peer: JAX_PEERS[peer]() for peer in own}
    found["no norm"] = dict.fromkeys(("layer", "batch"), without)
    for peer, norms in found.items():
        step = add_layer if peer.startswith("jaxnorm") else partial(add_and_norm, norms["layer"])
        norms["add layer"] = step
    return found


def add_layer(x, residual, scale, bias) -> tuple[jax.Array, jax.Array]:
    """Return the layer norm of x + residual, and the sum."""
    return jn.add_norm(x, residual, norm="layer", scale=scale, bias=bias)


def add_and_norm(norm: Callable, x, residual, scale, bias) -> tuple[jax.Array, jax.Array]:
    """Return a norm of x + residual, and the sum."""
    total = x + residual
    return norm(total, scale, bias), total


def with_gradients(block: Block, norms: Norms) -> Callable:
    """Return a function of params, x and dy: y, and the gradients of params and x."""

    def call(params: Params, x: jax.Array, dy: jax.Array):
        y, pullback = jax.vjp(lambda *given: block.run(norms, *given), params, x)
        return y, pullback(dy)

    return call


def count(block: Block, kind: str, device, target: Target) -> dict:
    """Return what a block with these norms costs: output and all gradients, as one program."""
    params, x = block.types(SingleDeviceSharding(device))
    with asked_by(kind, target.platform):
        norms = kinds(target.platform)[kind]
        text = compiled(with_gradients(block, norms), params, x, x).as_text()
    return {"mib": transferred(text) / MIB, "cost": target.cost(text)}


def shown(counter: float) -> str:
    """
    >>> shown(20269203), shown(3566.05)
    ('20.27e6', '3566')
    """
    return f"{counter / 1e6:.2f}e6" if counter >= 1e6 else f"{counter:.0f}"


def table(rows: list[dict], unit: str) -> str:
    """Return a Markdown table of the counters of each block, divided by Flax's in brackets."""
    columns = list(dict.fromkeys(row["kind"] for row in rows))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for block in dict.fromkeys(row["block"] for row in rows):
        found = {row["kind"]: row for row in rows if row["block"] == block}
        for counter, title in (("mib", "MiB"), ("cost", unit)):
            flax = found["flax"][counter]
            cells = [
                f"{shown(found[kind][counter])} ({found[kind][counter] / flax:.2f})"
                for kind in columns
            ]
            lines.append(f"| {BLOCKS[block].title}: {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
