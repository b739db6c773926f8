"""Hooks of the documentation site: pages from elsewhere in the repository, formulas, and nothing
from other hosts.

Pages link to each other as they lie in the repository, so that links work in the sources too; here
they become the site's.
"""

import posixpath
import re
import sys
from functools import lru_cache
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import RegexRemovePreprocessor

sys.path.insert(0, str(Path(__file__).parent))
from reference import PACKAGES, with_norms

ROOT = Path(__file__).parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# A name is looked up to use it. Tables of results repeat the names of norms on every line, and
# filled the first page of answers.
BOOSTS = {
    "reference/": 4,
    "gallery.md": 3,
    "guides/": 2,
    "from/": 2,
    "results/": 0.1,
    "changelog.md": 0.1,
}
COMMITTED = ("axes.png", "samples.png")  # the other pictures of results pictures.py draws
FOLDERS = {"bench/results/": "results/", "notebooks/": "notebooks/", "examples/": "examples/"}
LINK = re.compile(r"(\]\()([^)#\s]+)")
ONLY_ON_COLAB = r"# @title Install jaxnorm[\s\S]*"  # the cell that installs the library there
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)[^>]*\ssrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link(?![^>]*rel=["']?(?:canonical|prev|next))[^>]*\shref=["']?(?:https?:)?//[^>]*>"""
    r"""|url\(["']?(?:https?:)?//[^)]*\)|@import\s+["'](?:https?:)?//[^;]*;"""
)


def on_config(config):
    fence = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [fence]
    return config


def formula(source: str, *_, **__) -> str:
    """A block of LaTeX as MathML, which browsers draw by themselves."""
    return f'<div class="formula">{convert(source, display="block")}</div>'


def on_files(files: Files, config) -> Files:
    """The results of experiments and benchmarks, the notebooks and the contributors' pages."""
    found = [ROOT / name for name in PAGES]
    found += [
        path
        for name in ("*.md", *COMMITTED)
        for path in sorted((ROOT / "bench" / "results").rglob(name))
    ]
    for path in found:
        files.append(File.generated(config, site_path(path), abs_src_path=str(path)))
    # a page each: what it says of itself, and its code
    for path in sorted((ROOT / "examples").rglob("*.py")):
        files.append(
            File.generated(
                config,
                site_path(path),
                content=f"# {path.name}\n\n```python\n{path.read_text()}```\n",
            )
        )
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebook(path)
        files.append(File.generated(config, site_path(path), content=text))
        for name, data in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
    return files


def site_path(path: Path) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    for folder, target in FOLDERS.items():
        if name.startswith(folder):
            return target + re.sub(r"\.(ipynb|py)$", ".md", name.removeprefix(folder))
    return PAGES.get(name)


def repository_path(src_uri: str) -> Path:
    """The inverse of :func:`site_path`."""
    for name, page in PAGES.items():
        if src_uri == page:
            return ROOT / name
    for folder, target in FOLDERS.items():
        if src_uri.startswith(target):
            return ROOT / folder / src_uri.removeprefix(target)
    return ROOT / "docs" / src_uri


@lru_cache
def notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown with the outputs that it was saved with, and its pictures."""
    exporter = MarkdownExporter()
    exporter.register_preprocessor(RegexRemovePreprocessor(patterns=[ONLY_ON_COLAB]), enabled=True)
    text, resources = exporter.from_filename(str(path))
    pictures = {f"{path.stem}_{name}": data for name, data in resources["outputs"].items()}
    for name in resources["outputs"]:
        text = text.replace(f"]({name})", f"]({path.stem}_{name})")
    return text, pictures


def on_page_markdown(markdown: str, page, **_) -> str:
    """Make links between files into links between pages, and rank pages in the search."""
    boost = next(
        (boost for folder, boost in BOOSTS.items() if page.file.src_uri.startswith(folder)), 1
    )
    page.meta.setdefault("search", {}).setdefault("boost", boost)
    if package := PACKAGES.get(page.file.src_uri):
        markdown = with_norms(markdown, package)
    folder = repository_path(page.file.src_uri).parent

    def on_site(link: re.Match) -> str:
        path = Path(posixpath.normpath(posixpath.join(folder.as_posix(), link[2])))
        known = path.is_relative_to(ROOT) and path.is_file() and site_path(path)
        return link[1] + (
            posixpath.relpath(known, posixpath.dirname(page.file.src_uri) or ".")
            if known
            else link[2]
        )

    return LINK.sub(on_site, markdown)


def on_post_build(config) -> None:
    """Fails if a page would load anything from another host."""
    for path in sorted(Path(config["site_dir"]).rglob("*")):
        if path.suffix in (".html", ".css"):
            for found in LOADED.finditer(path.read_text()):
                raise PluginError(
                    f"{path.relative_to(config['site_dir'])} loads from another host: {found[0]}"
                )
