"""The pages in Markdown, and what their blocks of code define."""

import re
from pathlib import Path

import jax

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}


def blocks(page: str, language: str = "python") -> list[str]:
    """Each block of Python of a page; those of ``py`` need what is not installed with the tests."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def run(code: str) -> dict:
    """The names that a block defines, run by itself, as a reader would who copies it."""
    names: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(code, names)
    return names
