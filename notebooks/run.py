"""Executes every notebook source and checks its .ipynb twin; ``--write`` renews the twins with their outputs.

Each has a badge that opens it in Colab as soon as pyproject.toml names the project's GitHub address (``Source`` in
``[project.urls]``); ``--write`` puts it under the title. The cell that installs jaxnorm is install.py in each, where ``--write`` puts it.
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
    return (
        "\n".join(
            [*lines[: title + 1], "#", f"# {shown}", *(["#"] if rest and rest[0] else []), *rest]
        )
        + "\n"
    )


def with_install(source: str) -> str:
    """A source that has install.py as the cell that begins as that does."""
    cell = (FOLDER / "install.py").read_text().rstrip()
    before, title, rest = source.partition(cell.splitlines()[0])
    if not title:
        raise SystemExit(f"a notebook must have a cell that begins with {cell.splitlines()[0]!r}")
    return before + cell + "\n\n" + rest[rest.index("# %%") :]


def run(source: Path, address: str, write: bool) -> None:
    """Executes one.

    Raises:
      SystemExit: it and its twin differ.
    """
    twin, text = source.with_suffix(".ipynb"), source.read_text()
    wanted = with_install(text)
    if address.startswith(GITHUB):
        wanted = with_badge(wanted, badge(source.stem, address))
    if write:
        source.write_text(wanted)
    notebook = jupytext.reads(wanted, fmt="py:percent")
    if not write and (wanted != text or cells(jupytext.read(twin)) != cells(notebook)):
        raise SystemExit(
            f"{twin.name} is not in step with {source.name}: run python notebooks/run.py --write"
        )
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    if write:
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        jupytext.write(notebook, twin)
    print(f"{source.name}: executed", flush=True)


def main() -> None:
    address = (
        tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
        .get("urls", {})
        .get("Source", "")
    )
    sources = [
        FOLDER / "colab.py",
        *sorted(FOLDER.glob("[0-9]*.py"), reverse=True),
    ]  # the short ones last, so that neither process waits for the other
    with ThreadPoolExecutor(2) as pool:  # each notebook has a process of its own
        running = [pool.submit(run, source, address, "--write" in sys.argv) for source in sources]
        wait(running, return_when=FIRST_EXCEPTION)
        pool.shutdown(cancel_futures=True)
    for found in running:
        found.result()


if __name__ == "__main__":
    main()
