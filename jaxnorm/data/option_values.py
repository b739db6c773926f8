"""Read the values of the options of `jaxnorm fit` and `jaxnorm convert`."""

import argparse
import re
from collections.abc import Callable
from typing import Any

from jaxnorm.data.host.sketch import ranks


def number_or_name(text: str) -> int | str:
    """Parse the number or the name of an axis."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def size(text: str) -> tuple[str, int]:
    """Parse the name of an axis and its size."""
    name, _, number = text.partition("=")
    if not name.isidentifier() or not number.isdecimal() or not int(number):
        raise argparse.ArgumentTypeError(f"must be NAME=SIZE: got {text!r}.")
    return name, int(number)


def members(text: str) -> list[Any]:
    """Parse a group of leaves and features, as ``Normalizer.share_deviation`` takes them.

    >>> members("u10,wind[1],2")
    ['u10', ('wind', 1), 2]
    """
    found: list[Any] = []
    for word in text.split(","):
        if feature := re.fullmatch(r"(.+)\[(\d+)\]", word):
            found.append((feature[1], int(feature[2])))
        else:
            found.append(int(word) if word.isdecimal() else word)
    if len(found) < 2:
        raise argparse.ArgumentTypeError(f"must name two or more, such as u10,v10: got {text!r}.")
    return found


def name_and_new(text: str) -> tuple[str, str]:
    """Parse the old and the new name of a leaf."""
    old, _, new = text.rpartition("=")
    if not old or not new:
        raise argparse.ArgumentTypeError(f"must be OLD=NEW: got {text!r}.")
    return old, new


def key_and(name: str) -> Callable[[str], tuple[str, str]]:
    """Return a parser of the key of an array and of another one, which the help calls ``name``."""

    def parsed(text: str) -> tuple[str, str]:
        key, _, other = text.partition("=")
        if not key or not other:
            raise argparse.ArgumentTypeError(f"must be KEY={name}: got {text!r}.")
        return key, other

    return parsed


def key_and_steps(text: str) -> tuple[str, int]:
    """Parse the key of an array and a number of steps."""
    # one array without a name needs no key
    key, _, steps = text.rpartition("=")
    if not steps.isdecimal() or not int(steps):
        raise argparse.ArgumentTypeError(f"must be KEY=STEPS, such as action=16: got {text!r}.")
    return key, int(steps)


def key_and_features(text: str) -> tuple[str, list[int]]:
    """Parse the key of an array and numbers of its features."""
    key, _, features = text.rpartition("=")
    if not key or not re.fullmatch(r"-?\d+(,-?\d+)*", features):
        form = "KEY=FEATURES, such as action=6,-1"
        raise argparse.ArgumentTypeError(f"must be {form}: got {text!r}.")
    return key, [int(feature) for feature in features.split(",")]


def ranks_of(text: str) -> tuple[float, ...]:
    """Parse the ranks of quantiles."""
    try:
        return ranks([float(part) for part in text.split(",")])
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be ranks from 0 to 1, such as 0.01,0.99: got {text!r}."
        ) from None
