"""List the tasks: each with its data, networks, norms, loss and default settings."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flax import linen as nn

from jaxnorm.experiments import data, data_sequences, sequences
from jaxnorm.experiments.models import DENSE, MLP, VARIANTS, LeNet
from jaxnorm.experiments.painter import Painter
from jaxnorm.experiments.training import Losses, cross_entropy, outputs_are_losses
from jaxnorm.experiments.transformers import CONDITIONED, Denoiser, VisionTransformer
from jaxnorm.experiments.writers import PenWriter, TextWriter


@dataclass(frozen=True)
class Task:
    """A comparison of norms.

    Attributes:
      summary: a line for ``--help``.
      load: returns the data; it takes the folder of data files, or None.
      model: returns a network; it takes norm, variant and momentum.
      variants: the norms that each variant takes.
      defaults: the settings where the command line gives none.
      losses: the loss of each example.
      unit: the unit of the loss.
      jobs: the number of runs at a time. More than one helps where networks are too
        small to occupy all cores.
    """

    summary: str
    load: Callable[[str | None], data.Dataset]
    model: Callable[[str, str, float], nn.Module]
    variants: Mapping[str, Collection[str]]
    defaults: Mapping[str, Any]
    losses: Losses = cross_entropy
    unit: str = "cross entropy"
    jobs: int = 1


# defaults that tasks build on: SEED of one seed, LENET of classifiers,
# TRANSFORMER of transformers, WRITING of densities
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
TRANSFORMER = SEED | {"batch_sizes": (64,), "epochs": 20}
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
        VARIANTS,
        LENET | {"epochs": 20},
    ),
    "mnist": Task("LeNet on MNIST", data.mnist, LeNet, VARIANTS, LENET | {"epochs": 5}),
    "pimnist": Task(
        "MLP 784-1000-1000-10 on MNIST, without the order of the pixels",
        data.mnist,
        MLP,
        {"mlp": DENSE},
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
        # these networks train as fast on one core as on two (55 and 54 steps/s)
        jobs=2,
    ),
    "sequential-mnist": Task(
        "LSTM, GRU and RNN that read MNIST by rows or pixels",
        data.mnist,
        sequences.ImageReader,
        WAYS,
        SEED | {"variants": ("lstm-rows",), "norms": ("none", "layer", "batch"), "epochs": 3},
    ),
    "vowels": Task(
        "LSTM, GRU and RNN that recognize speakers by utterances of 7 to 29 steps",
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
        "LSTM(128) that predicts the next character of Shakespeare",
        data_sequences.text,
        TextWriter,
        WRITERS,
        WRITING,
        outputs_are_losses,
        "bits per character",
    ),
    "handwriting": Task(
        "LSTM(128) and mixture density that predict the next point of pen drawings",
        data_sequences.strokes,
        PenWriter,
        WRITERS,
        WRITING,
        outputs_are_losses,
        "nats per drawing",
    ),
    "vit": Task(
        "vision transformer on scikit-learn's digits, with and without QK norm",
        data.small_digits,
        VisionTransformer,
        dict.fromkeys(("vit", "vit-qk"), DENSE),
        TRANSFORMER
        | {
            "variants": ("vit", "vit-qk"),
            "norms": ("none", "layer", "rms", "dynamic_tanh"),
            "learning_rate": 1e-2,
        },
    ),
    "denoise": Task(
        "diffusion transformer on scikit-learn's digits, conditioned in three ways",
        data.digits_with_labels,
        Denoiser,
        CONDITIONED,
        TRANSFORMER
        | {
            "variants": tuple(CONDITIONED),
            "norms": ("none", "layer", "rms"),
            "learning_rate": 3e-3,
        },
        outputs_are_losses,
        "squared error per pixel",
    ),
    "draw": Task(
        "DRAW on binarized MNIST: LSTM(128), 8 steps, whole or by attention",
        data.binarized,
        Painter,
        dict.fromkeys(("whole", "attention"), WRITERS["lstm"]),
        WRITING | {"variants": ("whole",), "batch_sizes": (128,)},
        outputs_are_losses,
        "nats per image (bound)",
    ),
}
