"""Draws the gallery's pictures, docs/images/*.svg: which elements share statistics. ``python
docs/tools/draw.py``

Axes 0, 1 and 2 of an array go back to the right, down, and back to the left; the element in the
front corner is the first one, and the coloured elements are those that share its statistics. The
colours are for light and dark pages alike.
"""

from pathlib import Path

import numpy as np

from jaxnorm.experiments.picture import shared

FOLDER = Path(__file__).parents[1] / "images"
RIGHT, DOWN, LEFT = np.array([15.0, -7.5]), np.array([0.0, 15.0]), np.array([-15.0, -7.5])
IMAGES, SEQUENCES = (4, 3, 2, 4), (4, 6, 8)  # n, h, w, c and n, t, c
# top, right and left faces
INSIDE, OUTSIDE = ("#f2a46b", "#e8823a", "#c9642a"), ("#aab4be40", "#8f9ba640", "#74808c40")
INK, LINE = "#7d8894", "#8a96a3"
OVER_IMAGES, OVER_SEQUENCES = ("n", "h, w", "c"), ("n", "t", "gates")

# file: (pattern, sizes of split axes, shape, names of the axes)
PICTURES = {
    "batch": ("[n h w] c", {}, IMAGES, OVER_IMAGES),
    "ghost": ("(k [n]) [h w] c", {"k": 2}, IMAGES, OVER_IMAGES),
    "layer": ("n h w [c]", {}, IMAGES, OVER_IMAGES),
    "layer-image": ("n [h w c]", {}, IMAGES, OVER_IMAGES),
    "instance": ("n [h w] c", {}, IMAGES, OVER_IMAGES),
    "group": ("n [h w] (g [c])", {"g": 2}, IMAGES, OVER_IMAGES),
    "nodes": ("b [n] c", {}, SEQUENCES, ("graphs", "nodes", "c")),
    "weight": ("[i] o", {}, (6, 5), ("in", "", "out")),
    "spectral": ("[i o]", {}, (6, 5), ("in", "", "out")),
    "steps": ("n t [c]", {}, SEQUENCES, OVER_SEQUENCES),
    "steps-gate": ("n t (g [c])", {"g": 4}, SEQUENCES, OVER_SEQUENCES),
    "steps-batch": ("[n] t c", {}, SEQUENCES, OVER_SEQUENCES),
}


def mask(name: str) -> np.ndarray:
    """True for the elements that share statistics with the first one, with three axes: right, down,
    left.
    """
    pattern, sizes, shape, _ = PICTURES[name]
    found = shared(pattern, sizes, shape)
    return found.reshape(len(found), -1, shape[-1]) if len(shape) > 2 else found[:, None]


def gates_of_gru() -> np.ndarray:
    """r and z share statistics, n has its own."""
    first = shared("n t [c]", {}, (4, 6, 4))
    return np.concatenate([first, np.zeros((4, 6, 2), bool)], -1)


def svg(inside: np.ndarray, names: tuple[str, str, str]) -> str:
    """The cuboid of these elements, seen from above its front corner."""
    n, p, c = inside.shape
    top, right, left = (
        [
            _face(i * RIGHT + k * LEFT, RIGHT, LEFT, INSIDE[0] if inside[i, 0, k] else OUTSIDE[0])
            for i in range(n)
            for k in range(c)
        ],
        [
            _face(i * RIGHT + j * DOWN, RIGHT, DOWN, INSIDE[1] if inside[i, j, 0] else OUTSIDE[1])
            for i in range(n)
            for j in range(p)
        ],
        [
            _face(k * LEFT + j * DOWN, LEFT, DOWN, INSIDE[2] if inside[0, j, k] else OUTSIDE[2])
            for k in range(c)
            for j in range(p)
        ],
    )
    labels = [
        _label(n / 2 * RIGHT + p * DOWN + (10, 14), names[0], "start"),
        _label(c * LEFT + p / 2 * DOWN + (-6, 4), names[1], "end"),
        _label(c / 2 * LEFT + p * DOWN + (-10, 14), names[2], "end"),
    ]
    x0, x1 = c * LEFT[0] - 36, n * RIGHT[0] + 30
    y0, y1 = (n * RIGHT + c * LEFT)[1] - 4, p * DOWN[1] + 8
    box = f"{x0:g} {y0:g} {x1 - x0:g} {y1 - y0:g}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" '
        f'width="{x1 - x0:g}" height="{y1 - y0:g}">'
    )
    style = (
        f"<style>path{{stroke:{LINE};stroke-width:.6}}"
        f"text{{font:13px sans-serif;fill:{INK}}}</style>"
    )
    return "\n".join([head, style, *top, *right, *left, *labels, "</svg>", ""])


def _face(corner: np.ndarray, along: np.ndarray, across: np.ndarray, color: str) -> str:
    corners = (corner, corner + along, corner + along + across, corner + across)
    return f'<path d="M{" ".join(f"{x:g},{y:g}" for x, y in corners)}z" fill="{color}"/>'


def _label(at: np.ndarray, text: str, anchor: str) -> str:
    return f'<text x="{at[0]:g}" y="{at[1]:g}" text-anchor="{anchor}">{text}</text>' if text else ""


def drawn() -> dict[str, str]:
    """Every picture, by the name of its file."""
    pictures = {f"{name}.svg": svg(mask(name), PICTURES[name][-1]) for name in PICTURES}
    return pictures | {"steps-gru.svg": svg(gates_of_gru(), OVER_SEQUENCES)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in drawn().items():
        (FOLDER / file).write_text(text)
