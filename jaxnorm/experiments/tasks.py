"""What can be compared: for each task its data, its networks, its norms, and settings that suit it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flax import linen as nn

from jaxnorm.experiments import data, sequences
from jaxnorm.experiments.models import PLACES, LeNet


@dataclass(frozen=True)
class Task:
    """A comparison of norms; a network is ``model(norm, variant, momentum)``."""

    summary: str
    load: Callable[[str | None], data.Dataset]
    model: Callable[[str, str, float], nn.Module]
    variants: Mapping[str, Collection[str]]  # to the norms that each takes
    defaults: Mapping[str, Any]


CELLS = {cell: tuple(sequences.NORMS) for cell in sequences.LAYERS}
WAYS = {f"{cell}-{way}": norms for way in sequences.READ for cell, norms in CELLS.items()}
ROWS = tuple(variant for variant in WAYS if variant.endswith("rows"))
LENET = {"variants": ("dense",), "norms": ("none", "batch", "layer"), "batch_sizes": (128, 8), "seeds": 3, "momentum": 0.99}

TASKS = {
    "digits": Task(
        "LeNet on scikit-learn's digits; norms in the dense or the conv part", data.digits, LeNet, PLACES, LENET | {"epochs": 20}
    ),
    "mnist": Task("the same on MNIST", data.mnist, LeNet, PLACES, LENET | {"epochs": 5}),
    "sequential": Task(
        "LSTM, GRU and RNN that read scikit-learn's digits by rows or pixels",
        data.small_digits,
        sequences.ImageReader,
        WAYS,
        {"variants": ROWS, "norms": ("none", "layer", "batch"), "batch_sizes": (128,), "seeds": 1, "momentum": 0.9, "epochs": 15},
    ),
    "imdb": Task(
        "Embedding, LSTM(128), sigmoid on film reviews of at most 200 words",
        data.imdb,
        sequences.TextReader,
        CELLS,
        {"variants": ("lstm",), "norms": ("none", "layer", "layer-0.3"), "batch_sizes": (128,), "seeds": 1, "momentum": 0.9, "epochs": 3},
    ),
}
