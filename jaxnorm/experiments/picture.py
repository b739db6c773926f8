"""Draw which elements of a batch of images share one mean and one variance under each norm."""

from pathlib import Path

import numpy as np

from jaxnorm.arguments.axes import resolve
from jaxnorm.experiments.figures import pyplot, save

# examples, height, width, channels
SHAPE = (4, 3, 3, 4)
PATTERNS = {
    "batch norm": ("[n h w] c", {}),
    "layer norm": ("n [h w c]", {}),
    "layer norm (Flax)": ("n h w [c]", {}),
    "instance norm": ("n [h w] c", {}),
    "group norm": ("n [h w] (g [c])", {"g": 2}),
    "ghost batch norm": ("(k [n]) [h w] c", {"k": 2}),
}


def shared(pattern: str, sizes: dict[str, int], shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Return a mask of the elements that share statistics with the first one.

    >>> shared("[n] c", {}, (2, 3)).tolist()
    [[True, False, False], [True, False, False]]
    """
    reduction = resolve(pattern, shape, sizes)
    first = np.zeros(reduction.split_shape, bool)
    first[tuple(slice(None) if axis in reduction.axes else 0 for axis in range(first.ndim))] = True
    return first.reshape(shape)


def draw(path: Path) -> None:
    """Draw a cube for each pattern.

    Its axes are examples, channels and positions, with height and width as one axis.
    """
    figure = pyplot().figure(figsize=(12, 7.4), layout="constrained")
    n, height, width, channels = SHAPE
    for i, (name, (pattern, sizes)) in enumerate(PATTERNS.items()):
        axes = figure.add_subplot(2, 3, i + 1, projection="3d")
        in_group = (
            shared(pattern, sizes)
            .reshape(n, height * width, channels)
            .transpose(0, 2, 1)[:, :, ::-1]
        )
        colors = np.where(in_group, "#e8823a", "#dfe6ee").astype(object)
        axes.voxels(np.ones_like(in_group), facecolors=colors, edgecolor="#8a96a3", linewidth=0.4)
        given = ", ".join(f"{key}={value}" for key, value in sizes.items())
        axes.set_title(
            f'{name}\n"{pattern}"' + (f", {given}" if given else ""),
            family="monospace",
            fontsize=11,
        )
        axes.set(xticks=[], yticks=[], zticks=[])
        # the layout ignores the labels of three-dimensional axes: leave room for them
        axes.set_box_aspect((4, 4, 6), zoom=0.88)
        for name, text in (("x", "examples n"), ("y", "channels c"), ("z", "positions h, w")):
            getattr(axes, f"set_{name}label")(text, labelpad=-13, fontsize=9)
        axes.view_init(elev=22, azim=-128)
    save(figure, path, "What is coloured shares one mean and one variance", dpi=100)
