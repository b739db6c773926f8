"""Executes every notebook source and checks its .ipynb twin; ``--write`` renews the twins with their outputs.

Each has a badge that opens it in Colab as soon as pyproject.toml names the project's GitHub address (``Source`` in
``[project.urls]``); ``--write`` puts it under the title.
"""

import sys
import tomllib
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

import jupytext
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
GITHUB, COLAB = "https://github.com/", "https://colab.research.google.com/"


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def badge(name: str, address: str) -> str:
    """What opens notebook ``name`` of the main branch in Colab."""
    repository = address.removeprefix(GITHUB).removesuffix("/").removesuffix(".git")
    return f"[![Open in Colab]({COLAB}assets/colab-badge.svg)]({COLAB}github/{repository}/blob/main/notebooks/{name}.ipynb)"


def with_badge(source: str, shown: str) -> str:
    """A source that has it as the paragraph after its title, in place of another one."""
    lines = [line for line in source.splitlines() if not line.startswith("# [![Open in Colab]")]
    title = next(number for number, line in enumerate(lines) if line.startswith("# # "))
    rest = lines[title + 1 :]
    while rest and rest[0] == "#":
        del rest[0]
    return "\n".join([*lines[: title + 1], "#", f"# {shown}", *(["#"] if rest and rest[0] else []), *rest]) + "\n"


def run(source: Path, address: str, write: bool) -> None:
    """Executes one.

    Raises:
      SystemExit: it and its twin differ.
    """
    twin, text = source.with_suffix(".ipynb"), source.read_text()
    wanted = with_badge(text, badge(source.stem, address)) if address.startswith(GITHUB) else text
    if write:
        source.write_text(wanted)
    notebook = jupytext.reads(wanted, fmt="py:percent")
    if not write and (wanted != text or cells(jupytext.read(twin)) != cells(notebook)):
        raise SystemExit(f"{twin.name} is not in step with {source.name}: run python notebooks/run.py --write")
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    if write:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        jupytext.write(notebook, twin)
    print(f"{source.name}: executed", flush=True)


def main() -> None:
    address = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"].get("urls", {}).get("Source", "")
    sources = sorted(FOLDER.glob("[0-9]*.py"), reverse=True)  # the short ones last, so that neither process waits for the other
    with ThreadPoolExecutor(2) as pool:  # each notebook has a process of its own
        running = [pool.submit(run, source, address, "--write" in sys.argv) for source in sources]
        wait(running, return_when=FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
    for found in running:
        found.result()


if __name__ == "__main__":
    main()
