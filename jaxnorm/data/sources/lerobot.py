"""Reader of LeRobot's data sets (v2 and v3), folders with Parquet files and meta/info.json."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxnorm.data.sources import columns
from jaxnorm.data.sources.addresses import SourceError, exists, inside, opened_file
from jaxnorm.data.sources.parquet import EPISODE, Parquet
from jaxnorm.data.sources.readers import Batch, Cut, Leaf

INFO = "meta/info.json"
# Columns that number steps, episodes and tasks.
INDICES = ("timestamp", "frame_index", EPISODE, "index", "task_index")
# What kinds of features hold that are no columns of numbers.
FRAMES = {"video": "the frames of videos", "image": "the images of frames"}
PAD = "_is_pad"


class LeRobot(Parquet):
    """Reader of the features of a data set; a column ``action_is_pad`` masks ``action``."""

    def __init__(self, path: str):
        with opened_file(inside(path, INFO)) as file:
            self.features, self.info = _described(path, file.read())
        if not exists(inside(path, "data")):
            raise SourceError(f"{path} must hold the folder data, beside {INFO}: there is none.")
        super().__init__(inside(path, "data"))
        self.path = path
        rows = sum(group.rows for group in self.groups)
        self._check_frames(rows, self.info.get("total_frames"))
        for name, feature in self.features.items():
            if feature["dtype"] in FRAMES:
                self.leaves[name] = Leaf((rows,), "frames", obstacle=FRAMES[feature["dtype"]])
            elif name not in self.leaves:
                raise SourceError(f"{path} must hold the column {name!r}, of {INFO}: it has none.")
            elif not self.leaves[name].unsupported:
                self._check_shape(name, self.leaves[name].shape[1:])
        self.pads = {f"{name}{PAD}": name for name in self.leaves if f"{name}{PAD}" in self.leaves}
        for name in {*INDICES, *self.pads} & self.leaves.keys():
            self.leaves[name] = self.leaves[name]._replace(is_coordinate=True)

    def read(self, along: Mapping[str, int], cut: Cut, after: int = 0) -> Batch:
        pads = {leaf: f"{leaf}{PAD}" for leaf in along if f"{leaf}{PAD}" in self.pads}
        read = super().read({**along, **dict.fromkeys(pads.values(), 0)}, cut, after)
        masks = {leaf: mask for leaf, mask in read.masks.items() if leaf in along}
        for leaf, pad in pads.items():
            keep = read[pad] == 0
            if pad in read.masks:
                keep &= read.masks[pad]
            keep = self._mask(leaf, read[leaf], keep)
            masks[leaf] = masks[leaf] & keep if leaf in masks else keep
        return Batch({leaf: read[leaf] for leaf in along}, masks)

    def episodes(self, leaves: Collection[str]) -> int | None:
        found = self.info.get("total_episodes")
        return found if isinstance(found, int) else None

    def _mask(self, leaf: str, x: np.ndarray, keep: np.ndarray) -> np.ndarray:
        if x.shape[: keep.ndim] != keep.shape:
            must = f"{self.path} must hold a mask of {leaf!r} in '{leaf}{PAD}'"
            shapes = f"{leaf!r} has rows of shape {x.shape[1:]}, its mask {keep.shape[1:]}"
            raise SourceError(f"{must}: {shapes}.")
        return keep.reshape(keep.shape + (1,) * (x.ndim - keep.ndim))

    def _check_frames(self, rows: int, described: Any) -> None:
        # a download may have stopped, or may be of some episodes only
        if isinstance(described, int) and rows != described:
            must = f"{self.path} must hold {described} frames by {INFO}: it holds {rows}"
            way = "Download the rest" if rows < described else "Download it anew"
            alone = f"fit {inside(self.path, 'data')} for these alone"
            raise SourceError(f"{must}. {way}, or {alone}.")

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        given = self._given_shape(name)
        # a feature of shape (1,) is a column of bare numbers
        if given is not None and _longer(given) != _longer(shape):
            raise SourceError(self._unlike(name, f"it holds rows of shape {shape}"))

    def _given_shape(self, name: str) -> tuple[int, ...] | None:
        given = self.features.get(name, {}).get("shape")
        return None if given is None else tuple(map(int, given))

    def _first_shape(self, field) -> tuple[int, ...]:
        # no data are read where the description knows the shape
        given = self._given_shape(field.name)
        if given is None or len(given) != columns.depth(field.type):
            return super()._first_shape(field)
        return given

    def _ragged(self, name: str, error: columns.RaggedError) -> str:
        if self._given_shape(name) is None:
            return super()._ragged(name, error)
        return self._unlike(name, f"there are lists of length {error.lengths}")

    def _unlike(self, name: str, held: str) -> str:
        must = f"{self.path} must hold rows of shape {self._given_shape(name)} in {name!r}"
        return f"{must}, by {INFO}: {held}. Mend {INFO}, or {self._without(name)}."


def _longer(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _described(path: str, data: bytes) -> tuple[Mapping[str, Mapping[str, Any]], Mapping]:
    """Return the features, and all of the description."""
    try:
        info = json.loads(data)
        features = info["features"]
        if not all("dtype" in feature for feature in features.values()):
            raise KeyError("dtype")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        said = f"{type(error).__name__}, {error}"
        raise SourceError(f"{path} must describe features in {INFO}: {said}.") from None
    return features, info
