"""Test that imports run one way, and that importing the library costs little."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from itertools import pairwise, product
from pathlib import Path
from typing import Unpack

import numpy
import pytest
from cases import long_sweep

import jaxnorm

ROOT = Path(jaxnorm.__file__).parent
# Each floor is built on those before it: its folders import nothing else.
FLOORS = [
    ["arguments"],
    ["engine"],
    ["kernels"],
    ["core"],
    ["data", "norms", "online", "recurrent"],
    ["flax_common", "host"],
    ["linen", "nnx"],
    ["checking", "interop", "training"],
    ["experiments"],
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FILES = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


def imported(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder(module):
    """The folder of jaxnorm, or file in it, that a module belongs to."""
    return module.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_downwards(path):
    own = path.parts[0].removesuffix(".py")
    for module in imported(path):
        if module.startswith("jaxnorm.") and folder(module) not in (own, "__version__"):
            assert FLOOR[folder(module)] < FLOOR[own], f"{path} imports {module}"


def test_no_two_files_import_each_other():
    """Not even by others, nor within a function."""
    names = {".".join(("jaxnorm", *path.with_suffix("").parts)): path for path in FILES}
    imports = {
        name: {module for module in imported(path) if module in names and module != name}
        for name, path in names.items()
    }
    list(TopologicalSorter(imports).static_order())  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=str)
def test_what_decides_is_asked_in_one_place(path):
    """Which implementation runs is decided in core/plan.py, and where arrays and kernels lie in
    kernels/.
    """
    if path.parts[0] not in ("kernels", "experiments") and path != Path("core/plan.py"):
        text = (ROOT / path).read_text()
        assert not re.findall(
            r"environ\b|getenv|default_backend\(|jax\.(?:local_)?devices\(|device_count\(|\.platform\b|known\(x\)",
            text,
        )
        if path != Path("engine/xla.py"):
            assert "optimization_barrier" not in text


def test_axes_need_no_jax():
    assert not any(
        module.split(".")[0] in ("jax", "numpy") for module in imported(Path("arguments/axes.py"))
    )


HEAVY = ("flax", "optax", "chex", "matplotlib", "rich", "sklearn", "scipy")
REACH = "import jaxnorm; jaxnorm.{}.LayerNorm"


@cache
def loaded():
    """What each of these adds to the modules before it, in one process that has none of them: JAX
    takes long to import.
    """
    statements = (
        "import jax, jax.numpy, jax.experimental.checkify, jax.export",
        "from jaxnorm import *",
        *map(REACH.format, ("nnx", "linen")),
    )
    code = "import sys\n" + "".join(
        f"{statement}\nprint(*sys.modules)\n" for statement in ("", *statements)
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    after = [set(line.split()) for line in shown]
    return [more - less for less, more in pairwise(after)]


def test_importing_the_library_loads_jax_and_itself_only():
    """jax.experimental.checkify and, before JAX 0.8, jax.export are modules that come with it."""
    _, new, *_ = loaded()
    assert "jaxnorm.norms.axes" in new
    assert {module for module in new if not module.startswith("jaxnorm")} == set()
    assert not any(module.split(".")[0] in HEAVY for module in new)


def test_the_modules_are_reached_from_the_package():
    *_, nnx, linen = loaded()
    assert {"flax.nnx", "jaxnorm.nnx"} <= nnx
    assert "jaxnorm.linen" in linen
    assert "flax.linen" in nnx | linen
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = jaxnorm.keras


STATEMENTS = product(
    ["linen", "nnx"], ["import jaxnorm.{0}", "from jaxnorm import {0}", "jaxnorm.{0}.LayerNorm"]
)


@pytest.mark.parametrize(
    ("module", "statement"), long_sweep(STATEMENTS, quick=[("linen", "jaxnorm.{0}.LayerNorm")])
)
def test_without_flax_its_modules_alone_are_missing(module, statement):
    code = (
        "import sys; sys.modules['flax'] = None; import jaxnorm; from jaxnorm import *; "
        f"{statement.format(module)}"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    said = (
        f"ImportError: jaxnorm.{module} needs flax, which is not installed: "
        "pip install 'jaxnorm[flax]'."
    )
    assert (result.returncode, result.stderr.splitlines()[-1]) == (1, said)
    assert "During handling" not in result.stderr


def test_an_error_within_flax_is_shown_as_it_is(tmp_path):
    (tmp_path / "flax.py").write_text("import no_such_module")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jaxnorm.linen"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'no_such_module'"


def test_no_module_bears_the_name_of_a_function():
    """``import jaxnorm.moments as m`` would give one or the other, by the order of imports."""
    assert {path.stem for path in ROOT.iterdir()}.isdisjoint(set(jaxnorm.__all__) - {"recurrent"})


def test_every_public_name_is_documented():
    for name in jaxnorm.__all__:
        text = getattr(jaxnorm, name).__doc__
        assert len(text.splitlines()) > 1 or name in ("AxisGroups", "recurrent"), name
    online = jaxnorm.online
    for module in (jaxnorm.recurrent, online, online.returns, online.ranges):
        for name in set(module.__all__) - {"returns", "Returns", "ranges", "Range"}:
            assert ">>>" in getattr(module, name).__doc__, name


@pytest.mark.parametrize(
    "module",
    [jaxnorm, jaxnorm.recurrent, jaxnorm.online, jaxnorm.online.returns, jaxnorm.online.ranges],
    ids=lambda module: module.__name__,
)
def test_public_functions_name_their_options(module):
    """In their own signatures, or in a TypedDict; only sizes of a pattern come by any keyword."""
    networks = jaxnorm.recurrent
    typed = {
        "sizes": [int],
        "options": [
            Unpack[options]
            for options in (
                jaxnorm.NormOptions,
                networks.NetworkOptions,
                networks.ParameterOptions,
            )
        ],
    }
    for name in module.__all__:
        if inspect.isfunction(function := getattr(module, name)):
            assert inspect.unwrap(function).__code__.co_name == name
            others = [
                p
                for p in inspect.signature(function).parameters.values()
                if p.kind is p.VAR_KEYWORD
            ]
            assert all(p.annotation in typed[p.name] for p in others), name


def test_recurrent_functions_take_the_same_options():
    lstm, gru, rnn = (
        inspect.signature(getattr(jaxnorm.recurrent, name)).parameters
        for name in ("lstm", "gru", "rnn")
    )
    # besides what one kind of cell alone has
    assert list(lstm) == [name for name in gru if name != "reset_after"]
    assert list(lstm) == [name for name in rnn if name != "activation"]
    # a pair for the LSTM
    assert all(lstm[name] == gru[name] == rnn[name] for name in lstm if name != "initial")
    for function in (getattr(jaxnorm.recurrent, name) for name in ("lstm", "gru", "rnn")):
        for option in jaxnorm.recurrent.NetworkOptions.__annotations__:
            assert f"``{option}``" in function.__doc__.partition("**options:")[2], option


def test_plan_takes_what_standardize_does():
    shown = inspect.signature(jaxnorm.plan)
    assert shown.parameters == inspect.signature(jaxnorm.standardize).parameters
    assert shown.return_annotation is jaxnorm.Plan
    x = numpy.ones((4, 3), numpy.float32)
    for name, parameter in inspect.signature(jaxnorm.standardize).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert isinstance(jaxnorm.plan(x, "n [c]", **{name: parameter.default}), jaxnorm.Plan)
    assert isinstance(jaxnorm.plan(x, "n (g [c])", g=3), jaxnorm.Plan)
    with pytest.raises(
        TypeError, match="'epsilom' is neither an argument nor a name in the pattern"
    ):
        jaxnorm.plan(x, "n [c]", epsilom=1.0)
