"""ResNet (He et al. 2015, arXiv 1512.03385) in Flax (linen), as PyTorch pads it.

    model = ResNet.of(json.loads(Path("config.json").read_text()))
    like = jax.eval_shape(model.init, jax.random.key(0), images)
    variables = jn.interop.load(like, "model.safetensors", framework="torch")
    logits = model.apply(variables, images)

ResNet-18 is the default; ResNet-50 has ``depths=(3, 4, 6, 3), bottleneck=True`` and four times the
features.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxnorm.linen import BatchNorm


class ConvNorm(nn.Module):
    """A convolution without bias and batch norm.

    A stride of 2 pads both sides, as PyTorch does; "SAME" would pad one side alone.
    """

    features: int
    window: int
    strides: int = 1
    train: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        window = (self.window, self.window)
        options = {"padding": self.window // 2, "use_bias": False, "param_dtype": self.param_dtype}
        x = nn.Conv(self.features, window, self.strides, **options)(x)
        norm = BatchNorm(
            use_running_average=not self.train, momentum=0.9, param_dtype=self.param_dtype
        )
        return norm(x)


class Block(nn.Module):
    """Two convolutions, or three with a narrow one in the middle, and a residual."""

    features: int
    strides: int = 1
    bottleneck: bool = False
    train: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = partial(ConvNorm, train=self.train, param_dtype=self.param_dtype)
        n = self.features
        sizes = [(n, 3, self.strides), (n, 3, 1)]
        if self.bottleneck:
            sizes = [(n // 4, 1, 1), (n // 4, 3, self.strides), (n, 1, 1)]
        y = x
        for i, size in enumerate(sizes):
            y = layer(*size, name=f"ConvNorm_{i}")(y if i == 0 else nn.relu(y))
        if x.shape != y.shape:
            x = layer(n, 1, self.strides, name="shortcut")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images (batch, height, width, channels) to logits.

    Attributes:
      num_classes: of the logits.
      depths: the number of blocks of each stage.
      features: of each stage.
      stem: the features of the first convolution.
      bottleneck: whether blocks have three convolutions.
      train: whether batch norm uses the batch, and updates its running statistics.
    """

    num_classes: int = 1000
    depths: Sequence[int] = (2, 2, 2, 2)
    features: Sequence[int] = (64, 128, 256, 512)
    stem: int = 64
    bottleneck: bool = False
    train: bool = False
    param_dtype: Any = jnp.float32

    @classmethod
    def of(cls, hf: Mapping[str, Any], **options: Any) -> "ResNet":
        """Read a ``config.json``, or ``model.config.to_dict()`` of transformers."""
        sizes = tuple(hf["depths"]), tuple(hf["hidden_sizes"]), hf["embedding_size"]
        return cls(len(hf["id2label"]), *sizes, hf["layer_type"] == "bottleneck", **options)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        options = {"train": self.train, "param_dtype": self.param_dtype}
        x = nn.relu(ConvNorm(self.stem, 7, 2, name="stem", **options)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)))
        for stage, (depth, features) in enumerate(zip(self.depths, self.features, strict=True)):
            for block in range(depth):
                strides = 2 if stage and not block else 1
                name = f"stages_{stage}_layers_{block}"
                x = Block(features, strides, self.bottleneck, name=name, **options)(x)
        classifier = nn.Dense(self.num_classes, param_dtype=self.param_dtype, name="classifier")
        return classifier(jnp.mean(x, (1, 2)))
