"""Test the documentation site.

Its pictures equal what the script draws, or are drawn while the site is built. Its
reference has every public name. Its checks can fail. The docstrings of the library name what
exists.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import pkgutil
import re
import subprocess
import sys
from functools import reduce
from types import SimpleNamespace
from typing import is_typeddict

import pytest
from pages import PAGES, ROOT

import jaxnorm
from jaxnorm import linen, nnx
from jaxnorm.nnx import flax_versions

TOOLS = ROOT / "docs" / "tools"
OF_TABLE = ("register_norm", "unregister_norm")
NORMS = [name for name in jaxnorm.__all__ if name.endswith("_norm") and name not in OF_TABLE]


def tool(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", TOOLS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_as_the_script_draws_them():
    drawn = tool("draw").drawn()
    assert {
        path.name: path.read_text() for path in (ROOT / "docs" / "images").glob("*.svg")
    } == drawn


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_pictures_that_the_site_draws_are_not_committed():
    command = ["git", "-C", str(ROOT / "bench" / "results"), "ls-files", "*.png"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    # which GitHub shows in README.md, and which stand beside data that is not committed
    kept = {"axes.png", *(f"{task}/samples.png" for task in ("draw", "handwriting", "text"))}
    assert set(found) == kept


def test_links_to_numbers_become_the_pictures_drawn_of_them():
    pytest.importorskip("mkdocs.structure.files")
    there = SimpleNamespace(get_file_from_path={"results/a/curves.png": "drawn"}.__getitem__)
    text = "[Curves: drawn of these](../results/a/results.json#curves.png), [b](results.json)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="guides/b.md"))
    shown = tool("pictures").on_page_markdown(text, page, None, there)
    assert shown == "![Curves](../results/a/curves.png), [b](results.json)"


@pytest.mark.parametrize(("status", "match"), [(1, "cannot be drawn"), (0, "a/no.png is none")])
def test_pictures_that_are_not_drawn_are_errors(status, match, tmp_path, monkeypatch):
    errors = pytest.importorskip("mkdocs.exceptions")
    hooks, process = tool("pictures"), SimpleNamespace(wait=lambda: status)
    monkeypatch.setattr(hooks, "drawing", lambda: (SimpleNamespace(name=tmp_path), [process]))
    file = SimpleNamespace(src_uri="a/no.png", abs_src_path=str(tmp_path / "a" / "no.png"))
    with pytest.raises(errors.PluginError, match=match):
        hooks.on_env(None, None, [file])


def test_coloured_are_the_elements_that_share_statistics():
    masks = {
        name: tool("draw").mask(name)
        for name in ("batch", "layer", "layer-image", "instance", "group", "steps-gate")
    }
    assert {name: int(found.sum()) for name, found in masks.items()} == {
        "batch": 4 * 6,
        "layer": 4,
        "layer-image": 6 * 4,
        "instance": 6,
        "group": 6 * 2,
        "steps-gate": 2,
    }


@pytest.mark.parametrize("name", NORMS)
def test_the_gallery_has_every_norm(name):
    modules = [module for module in linen.__all__ if module.lower() == name.replace("_", "")]
    assert f"[`{name}`][jaxnorm.{name}]" in PAGES["docs/gallery.md"]
    for module in modules:
        assert f"[`nnx.{module}`][jaxnorm.nnx.{module}]" in PAGES["docs/gallery.md"]
        assert hasattr(nnx, module)


@pytest.mark.parametrize(
    "package", ["jaxnorm", "jaxnorm.linen", "jaxnorm.nnx", "jaxnorm.recurrent"]
)
def test_the_reference_has_every_name_in_one_group(package):
    text = tool("reference").with_norms(
        PAGES[f"docs/reference/{package.removeprefix('jaxnorm.')}.md"], package
    )
    shown = re.findall(rf"^::: {package}\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted({*importlib.import_module(package).__all__} - {"recurrent"})
    assert re.findall(rf"\[{package}\.(\w+)\]", text) == shown  # the table at the top


@pytest.mark.parametrize(
    ("page", "boost"),
    [
        ("results/speed/README.md", 0.1),
        ("changelog.md", 0.1),
        ("index.md", 1),
        ("reference/jaxnorm.md", 4),
    ],
)
def test_tables_of_results_rank_low_in_the_search(page, boost):
    pytest.importorskip("nbconvert")
    pytest.importorskip("latex2mathml")
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=page), meta={})
    tool("hooks").on_page_markdown("", page=shown)
    assert shown.meta == {"search": {"boost": boost}}


LOADS = [
    '<script src="https://a.b/c.js">',
    '<link rel="stylesheet" href="//a.b/c.css">',
    "<img alt='' src=http://a.b/c.png>",
    "url(https://a.b)",
]


@pytest.mark.parametrize("text", LOADS)
def test_nothing_may_be_loaded_from_other_hosts(text, tmp_path):
    pytest.importorskip("nbconvert")
    errors = pytest.importorskip("mkdocs.exceptions")
    pytest.importorskip("latex2mathml")
    hooks = tool("hooks")
    (tmp_path / "page.html").write_text('<a href="https://a.b">fine</a><img src="own.png">')
    hooks.on_post_build({"site_dir": tmp_path})
    (tmp_path / "page.html").write_text(text)
    with pytest.raises(errors.PluginError, match="another host"):
        hooks.on_post_build({"site_dir": tmp_path})


def test_docstrings_become_markdown():
    pytest.importorskip("griffe")
    as_markdown = tool("docstrings").as_markdown
    assert (
        as_markdown("As :func:`ema`, not :class:`flax.linen.RNN`.", "jaxnorm.norms.axes")
        == "As [`ema`][jaxnorm.ema], not `flax.linen.RNN`."
    )
    assert (
        as_markdown("See :class:`BatchNorm`.", "jaxnorm.nnx.batch.SwitchableNorm")
        == "See [`BatchNorm`][jaxnorm.nnx.BatchNorm]."
    )
    assert (
        as_markdown("  >>> 1 + 1\n  2\n\nEnd", "jaxnorm")
        == "  ```pycon\n  >>> 1 + 1\n  2\n  ```\n\nEnd"
    )
    assert as_markdown("==  ==\na   b\n==  ==", "jaxnorm") == "```text\n==  ==\na   b\n==  ==\n```"


ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([\w.]+)`")
# Those that need a package which is missing, such as Flax or Dask, are skipped.
MODULES = [
    "jaxnorm",
    *(module.name for module in pkgutil.walk_packages(jaxnorm.__path__, "jaxnorm.")),
]


def classes(module):
    """The classes that a module defines."""
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__
    ]


def fields(value):
    """The names of the fields of a dataclass, NamedTuple or TypedDict; none for other classes."""
    if not (dataclasses.is_dataclass(value) or hasattr(value, "_fields") or is_typeddict(value)):
        return set()
    return set().union(*(inspect.get_annotations(base) for base in value.__mro__))


def has(owner, names):
    """Whether a module or class has an attribute or field, which has the next one, and so on."""
    # A field without a default is an attribute of objects alone.
    member = lambda owner, name: None if name in fields(owner) else getattr(owner, name)
    try:
        reduce(member, names, owner)
    except AttributeError:
        return False
    return True


def exists(reference, owners):
    """Whether a dotted name is in a package, or in one of the owners if it names no package.

    What has a stand-in here is in newer versions of Flax.
    """
    if reference.startswith("flax.nnx.") and hasattr(flax_versions, reference.split(".")[2]):
        return True
    names = reference.split(".")
    if names[0] not in ("flax", "jax", "jaxnorm"):
        return any(has(owner, names) for owner in owners)
    pytest.importorskip(names[0])
    for end in range(len(names), 0, -1):
        with contextlib.suppress(ImportError):
            return has(importlib.import_module(".".join(names[:end])), names[end:])
    return False


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_refer_to_what_exists(name):
    module = pytest.importorskip(name, exc_type=ImportError)
    packages = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
    # as a reader would look for a name: in the file, in its classes, in the packages around it
    owners = [module, *classes(module), *map(importlib.import_module, packages)]
    found = set(ROLE.findall(inspect.getsource(module)))
    assert {reference for reference in found if not exists(reference, owners)} == set()


@pytest.mark.parametrize("name", MODULES)
def test_attributes_of_docstrings_are_fields(name):
    module = pytest.importorskip(name, exc_type=ImportError)
    for value in classes(module):
        _, _, section = inspect.cleandoc(value.__doc__ or "").partition("\nAttributes:\n")
        named = set(re.findall(r"^  (\w+): ", section.partition("\n\n")[0], re.MULTILINE))
        if known := fields(value):
            assert named <= known, value
