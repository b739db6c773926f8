"""Gradients of LeNet's convolutions where images are flat, by the norm after them and its epsilon.

    python -m bench.flat_regions --data-dir DIR

DIR holds Keras' mnist.npz. Over the channels of one black pixel nothing varies at first: the biases
are all 0, and the derivative of the normalization is 1 / sqrt(epsilon). Prints, and writes to
bench/results/flat-regions.md, the length of the gradient of the first bias and of all parameters,
at the start, for one batch of 128, and the loss that 200 steps of gradient descent at 0.1 end with
(mean of the last 20).
"""

import argparse
from pathlib import Path

import jax
from flax import linen as nn

from jaxnorm import linen as jn
from jaxnorm.experiments.data import mnist
from jaxnorm.experiments.models import IMAGE, pool
from jaxnorm.experiments.probes import norm
from jaxnorm.experiments.training import cross_entropy


class Network(nn.Module):
    """LeNet's convolutions, normalized over the axes given, and one dense layer."""

    axes: tuple[int, ...] | None
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (6, 16):
            x = nn.Conv(features, (5, 5), padding="VALID")(x)
            if self.axes is not None:
                x = jn.LayerNorm(
                    epsilon=self.epsilon, reduction_axes=self.axes, feature_axes=self.axes
                )(x)
            x = pool(nn.tanh(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def trained(model: Network, params, images, labels) -> float:
    """The mean loss of the last 20 of 200 steps."""

    def step(params, batch):
        loss, gradient = jax.value_and_grad(loss_of(model, *batch))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss

    step, losses = jax.jit(step), []
    for start in range(0, 200 * 128, 128):
        params, loss = step(params, (images[start : start + 128], labels[start : start + 128]))
        losses.append(float(loss))
    return sum(losses[-20:]) / 20


def loss_of(model: Network, images, labels):
    return lambda params: cross_entropy(model.apply({"params": params}, images), labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.flat_regions", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--data-dir", help="folder of mnist.npz")
    data = mnist(parser.parse_args().data_dir)
    images, labels = data.train_inputs, data.train_labels
    titles = (
        "norm after the convolutions",
        "epsilon",
        "gradient of the first bias",
        "of all parameters",
        "loss after 200 steps",
    )
    rows = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    cases = [("none", None, 0.0), ("layer, over height, width, channels", IMAGE, 1e-6)]
    cases += [("layer, over channels", (-1,), epsilon) for epsilon in (1e-6, 1e-4, 1e-2)]
    for name, axes, epsilon in cases:
        model = Network(axes, epsilon)
        params = model.init(jax.random.key(0), images[:2])["params"]
        gradient = jax.grad(loss_of(model, images[:128], labels[:128]))(params)
        numbers = (
            norm(gradient["Conv_0"]["bias"]),
            norm(gradient),
            trained(model, params, images, labels),
        )
        rows.append(
            f"| {name} | {f'{epsilon:g}' if axes else ''} | "
            + " | ".join(f"{number:.3g}" for number in numbers)
            + " |"
        )
    text = "\n".join(rows)
    (Path(__file__).parent / "results" / "flat-regions.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
