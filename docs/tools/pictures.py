"""Hooks of the documentation site that draw the pictures of results while it is built.

Git has the numbers alone. A page links to them with the picture's name as their part, as in
``[Learning curves: drawn on the site, from these numbers](results.json#curves.png)``, which on
GitHub leads to the numbers; here it becomes the picture, drawn by ``python -m bench.pages``.
"""

import posixpath
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
RESULTS = "results/"  # on the site
LINK = re.compile(r"\[([^\]:]+)[^\]]*\]\(([^)#\s]*)results\.json#([\w-]+\.png)\)")


@cache  # for a server, which builds again and again
def drawing() -> tuple[TemporaryDirectory, list[subprocess.Popen]]:
    """A folder, and what draws into it while pages are read: two processes, half of it each."""
    folder = TemporaryDirectory()
    command = [sys.executable, "-m", "bench.pages", "--pictures", folder.name]
    names = sorted(path.parent.name for path in ROOT.glob("bench/results/*/results.json"))
    halves = names[::2], names[1::2]
    return folder, [subprocess.Popen([*command, *half], cwd=ROOT) for half in halves]


def on_pre_build(config) -> None:
    drawing()


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Shows what such links name, after ``hooks.py`` has made them those between pages."""
    for _, folder, name in LINK.findall(markdown):
        here = posixpath.dirname(page.file.src_uri)
        uri = posixpath.normpath(posixpath.join(here, folder, name))
        if files.get_file_from_path(uri) is None:
            drawn = Path(drawing()[0].name, uri.removeprefix(RESULTS))
            files.append(File.generated(config, uri, abs_src_path=str(drawn)))
    return LINK.sub(r"![\1](\2\3)", markdown)


def on_env(env, config, files: Files) -> None:
    """Waits for the pictures, which are copied next.

    Raises:
      PluginError: they cannot be drawn, or a page names one that is not among them.
    """
    folder, processes = drawing()
    if any(process.wait() for process in processes):
        raise PluginError("The pictures of results cannot be drawn: see above.")
    for file in files:
        path = Path(file.abs_src_path or "")
        if path.is_relative_to(folder.name) and not path.exists():
            raise PluginError(f"{file.src_uri} is none of the pictures that bench/pages.py draws.")


def on_build_error(error) -> None:
    """Ends what still draws; a server begins anew."""
    folder, processes = drawing()
    for process in processes:
        process.kill()
        process.wait()
    folder.cleanup()
    drawing.cache_clear()
