"""What can be compared: for each task its data, its networks, its norms, its loss, and settings
that suit it.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flax import linen as nn

from jaxnorm.experiments import data, data_sequences, sequences
from jaxnorm.experiments.models import MLP, PLACES, LeNet
from jaxnorm.experiments.painter import Painter
from jaxnorm.experiments.training import Losses, cross_entropy, own
from jaxnorm.experiments.writers import PenWriter, TextWriter


@dataclass(frozen=True)
class Task:
    """A comparison of norms; a network is ``model(norm, variant, momentum)``."""

    summary: str
    load: Callable[[str | None], data.Dataset]
    model: Callable[[str, str, float], nn.Module]
    variants: Mapping[str, Collection[str]]  # to the norms that each takes
    defaults: Mapping[str, Any]
    losses: Losses = cross_entropy
    unit: str = "cross entropy"  # of the loss
    jobs: int = 1  # runs at a time: more where networks are too small for all cores


SEED = {"batch_sizes": (128,), "seeds": 1, "learning_rate": 1e-3, "momentum": 0.9}
CELLS = {cell: tuple(sequences.NORMS) for cell in sequences.LAYERS}
WRITERS = {cell: tuple(norm for norm in norms if norm != "batch") for cell, norms in CELLS.items()}
WAYS = {f"{cell}-{way}": norms for way in sequences.READ for cell, norms in CELLS.items()}
READERS = tuple(variant for variant in WAYS if variant.endswith(("rows", "embedded")))
LENET = SEED | {
    "variants": ("dense",),
    "norms": ("none", "batch", "layer"),
    "batch_sizes": (128, 8),
    "seeds": 3,
    "momentum": 0.99,
}
WRITING = SEED | {
    "variants": ("lstm",),
    "norms": ("none", "layer"),
    "batch_sizes": (64,),
    "epochs": 3,
}

TASKS = {
    "digits": Task(
        "LeNet on scikit-learn's digits; norms in the dense or the conv part",
        data.digits,
        LeNet,
        PLACES,
        LENET | {"epochs": 20},
    ),
    "mnist": Task("the same on MNIST", data.mnist, LeNet, PLACES, LENET | {"epochs": 5}),
    "pimnist": Task(
        "MLP 784-1000-1000-10 on MNIST, as if pixels had no places",
        data.mnist,
        MLP,
        {"mlp": ("none", "batch", "layer", "rms", "group")},
        LENET
        | {
            "variants": ("mlp",),
            "batch_sizes": (128, 4),
            "seeds": 1,
            "epochs": 3,
            "train_examples": 55_000,
        },
    ),
    "sequential": Task(
        "LSTM, GRU and RNN that read scikit-learn's digits by rows or pixels",
        data.small_digits,
        sequences.ImageReader,
        WAYS,
        SEED
        | {
            "variants": READERS,
            "norms": ("none", "layer", "batch"),
            "epochs": 6,
            "learning_rate": 1e-2,
        },
        jobs=2,
    ),
    "sequential-mnist": Task(
        "the same on MNIST",
        data.mnist,
        sequences.ImageReader,
        WAYS,
        SEED | {"variants": ("lstm-rows",), "norms": ("none", "layer", "batch"), "epochs": 3},
    ),
    "vowels": Task(
        "speakers recognized by utterances of 7 to 29 steps; LSTM, GRU, RNN",
        data_sequences.vowels,
        sequences.UtteranceReader,
        CELLS,
        SEED
        | {
            "variants": ("lstm", "gru", "rnn"),
            "norms": ("none", "layer", "batch"),
            "batch_sizes": (32,),
            "seeds": 3,
            "epochs": 40,
        },
    ),
    "imdb": Task(
        "Embedding, LSTM(128), sigmoid on film reviews of at most 200 words",
        data_sequences.imdb,
        sequences.TextReader,
        CELLS | {f"{cell}-glove": norms for cell, norms in CELLS.items()},
        SEED | {"variants": ("lstm",), "norms": ("none", "layer", "layer-0.3"), "epochs": 3},
    ),
    "text": Task(
        "the next character of Shakespeare by an LSTM(128)",
        data_sequences.text,
        TextWriter,
        WRITERS,
        WRITING,
        own,
        "bits per character",
    ),
    "handwriting": Task(
        "the next point of pen drawings by an LSTM(128) and a mixture density",
        data_sequences.strokes,
        PenWriter,
        WRITERS,
        WRITING,
        own,
        "nats per drawing",
    ),
    "draw": Task(
        "DRAW on binarized MNIST: LSTM(128), 8 steps, whole or by attention",
        data.binarized,
        Painter,
        dict.fromkeys(("whole", "attention"), WRITERS["lstm"]),
        WRITING | {"variants": ("whole",), "batch_sizes": (128,)},
        own,
        "nats per image (bound)",
    ),
}
