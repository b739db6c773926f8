"""Statistics of episodes, merged into those of all of them, and how many there are.

No one normalizes by the number of episodes, so it is a note.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxnorm.data.formats.contents import FormatError, Statistics
from jaxnorm.data.host.statistics import Moments

NOTE = re.compile(r"The data set(?: '(.+)')? has (\d+) episodes\.")


def counted(count: int, name: str = "") -> str:
    """Return the note of how many episodes a data set has.

    >>> counted(50), counts([counted(3, "bridge"), "Another note."])
    ('The data set has 50 episodes.', {'bridge': 3})
    """
    return f"The data set{f' {name!r}' if name else ''} has {count} episodes."


def counts(notes: Iterable[str]) -> dict[str, int]:
    """Return the numbers of episodes that notes tell, by the name of a data set."""
    found = [match for note in notes if (match := NOTE.fullmatch(note))]
    return {match[1] or "": int(match[2]) for match in found}


def without_counts(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return notes without those of how many episodes there are."""
    return tuple(note for note in notes if not NOTE.fullmatch(note))


def merged(path: Path, episodes: Iterable[dict[str, Statistics]]) -> dict[str, Statistics]:
    """Return the statistics of all episodes by leaf.

    Count, mean, variance and extremes are those of all elements. Quantiles, which those of parts do
    not give, are bounds: the smallest of the parts up to the median, and the largest above it.

    Raises:
      FormatError: there is no episode, or one lacks a count or has other features.
    """
    by_leaf: dict[str, list[Statistics]] = {}
    for episode in episodes:
        for leaf, statistics in episode.items():
            by_leaf.setdefault(leaf, []).append(statistics)
    if not by_leaf:
        raise FormatError(f"{path} must hold an episode at least: it holds none.")
    return {leaf: _merged(path, leaf, parts) for leaf, parts in by_leaf.items()}


def _merged(path: Path, leaf: str, parts: list[Any]) -> Statistics:
    said = f"{path} must hold the same statistics of {leaf!r} in every episode"
    for name in ("mean", "var", "count", "min", "max"):
        if any(getattr(part, name) is None for part in parts):
            raise FormatError(f"{said}, to be merged: one has no {name}.")
    if len(shapes := {part.mean.shape for part in parts}) > 1:
        raise FormatError(f"{said}: their shapes are {', '.join(map(str, sorted(shapes)))}.")
    column = lambda name: np.stack([getattr(part, name) for part in parts])
    moments = Moments(column("count"), column("mean"), column("var")).merge(0)
    ranks = set.intersection(*(set(part.quantiles or {}) for part in parts))
    bounds = {
        rank: (np.min if rank <= 0.5 else np.max)([part.quantiles[rank] for part in parts], axis=0)
        for rank in sorted(ranks)
    }
    return Statistics(
        mean=moments.mean[0],
        var=moments.var[0],
        count=moments.count[0],
        min=column("min").min(0),
        max=column("max").max(0),
        quantiles=bounds or None,
    )
