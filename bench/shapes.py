"""Shapes of real networks: at them the benchmarks measure norms, and the tests compare them with
the oracle.
"""

from typing import NamedTuple

ROWS = ("layer", "rms")  # of features: statistics of each row
IMAGES = ("batch", "instance", "group", "switchable")


class Shape(NamedTuple):
    """Where an array of this shape is normalized, and by which norms."""

    where: str
    norms: tuple[str, ...]

    @staticmethod
    def sizes(name: str) -> tuple[int, ...]:
        """
        >>> Shape.sizes("32x7x7x512")
        (32, 7, 7, 512)
        """
        return tuple(map(int, name.split("x")))


SHAPES = {
    "256x768": Shape("256 tokens of BERT-base", ROWS),
    "4096x1024": Shape("8 sequences of 512 tokens in BERT-large", ROWS),
    "32768x128": Shape("queries of 1024 tokens and 32 heads", ROWS),
    "512x4096": Shape("512 tokens of Llama 7B", ROWS),
    "16x32x32x128": Shape("a diffusion U-Net for images of 32 x 32", IMAGES),
    "32x56x56x64": Shape("first stage of ResNet-18", IMAGES),
    "32x7x7x512": Shape("last stage of ResNet-18", IMAGES),
    "8x64": Shape("small: the cost of a call", (*ROWS, "batch")),
}

# On accelerators, which the shapes above do not fill: nor could a CPU's tests afford these.
LARGE = {
    "32768x4096": Shape("8 sequences of 4096 tokens in Llama 7B", ROWS),
    "256x56x56x256": Shape("256 images in the first stage of ResNet-50", IMAGES),
}
