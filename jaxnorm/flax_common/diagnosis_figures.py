"""Draw diagnoses: over the depth of a model, and over time."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxnorm.flax_common.health import Health

# a logarithmic axis labels powers of ten alone, of which smaller numbers have too few
WIDE = 100
# each picture: its title, its numbers, and whether its axis is logarithmic where numbers are WIDE
PANELS = (
    ("mean and deviation", ("mean", "deviation"), False),
    ("|mean| / deviation", ("offset",), True),
    ("share of groups and channels", ("collapsed", "dead", "not_finite"), False),
    ("running statistics", ("mean_distance", "var_ratio"), True),
    ("largest channel", ("exploding",), True),
    ("gain", ("gain_min", "gain_max"), False),
)
# the lines of the numbers of one picture
STYLES = ("-", "--", ":")
# as many names of norms have room at the side of the pictures
NAMED = 50


def over_depth(rows: Sequence[tuple[str, str, Health]], path: Any) -> Any:
    """Draw each number over the norms of a model, given path, class and numbers of each."""
    figure, axes = _figure()
    for ax, (title, numbers, logarithmic) in zip(axes, PANELS, strict=True):
        for number in numbers:
            values = [getattr(health, number) for *_, health in rows]
            points = [(i, float(v)) for i, v in enumerate(values) if v is not None]
            if points:
                ax.plot(*zip(*points, strict=True), marker="o", label=number)
        _finish(ax, title, logarithmic)
        ax.set_xticks(range(len(rows)), [name for name, *_ in rows], rotation=90, fontsize=6)
    return _saved(figure, path)


def over_time(lines: Mapping[str, Sequence[float]], steps: Sequence[float], path: Any) -> Any:
    """Draw numbers over steps of training, given by ``"path/number"``, a color for each norm."""
    figure, axes = _figure()
    from matplotlib import colormaps

    norms = list(dict.fromkeys(name.rpartition("/")[0] for name in lines))
    depths = (index / max(1, len(norms) - 1) for index in range(len(norms)))
    colors = dict(zip(norms, map(colormaps["viridis"], depths), strict=True))
    for ax, (title, numbers, logarithmic) in zip(axes, PANELS, strict=True):
        for number, style in zip(numbers, STYLES, strict=False):
            drawn = [norm for norm in norms if f"{norm}/{number}" in lines]
            for norm in drawn:
                label = number if norm == drawn[0] else None
                values = lines[f"{norm}/{number}"]
                ax.plot(steps, values, style, color=colors[norm], marker=".", label=label)
        _finish(ax, title, logarithmic)
    named = norms[:: math.ceil(len(norms) / NAMED)]
    handles = [axes[0].plot([], [], color=colors[norm], label=norm or "norm")[0] for norm in named]
    figure.legend(handles=handles, loc="outside right upper", fontsize=6)
    return _saved(figure, path)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib.") from error
    figure = Figure(figsize=(12, 7), layout="constrained")
    return figure, figure.subplots(2, 3).ravel()


def _finish(ax: Any, title: str, logarithmic: bool) -> None:
    ax.set_title(title, fontsize=9)
    drawn = [abs(value) for line in ax.lines for value in line.get_ydata()]
    if logarithmic and max(drawn, default=0) > WIDE:
        ax.set_yscale("symlog", linthresh=1)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=6, handlelength=4)


def _saved(figure: Any, path: Any) -> Any:
    if path is not None:
        figure.savefig(path)
    return figure
