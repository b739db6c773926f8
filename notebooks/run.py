"""Executes every notebook source and checks its .ipynb twin; ``--write`` renews the twins with their outputs."""

import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def main() -> None:
    sources = sorted(FOLDER.glob("[0-9]*.py"))
    for source in sources:
        notebook, twin = jupytext.read(source), source.with_suffix(".ipynb")
        if "--write" not in sys.argv and cells(jupytext.read(twin)) != cells(notebook):
            sys.exit(f"{twin.name} is not in step with {source.name}: run python notebooks/run.py --write")
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
        if "--write" in sys.argv:
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)
            jupytext.write(notebook, twin)
        print(f"{source.name}: executed")


if __name__ == "__main__":
    main()
