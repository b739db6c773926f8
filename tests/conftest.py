"""Run every test with strict dtype and rank promotion, on eight host devices.

Few tests run programs that XLA has optimized.
"""

import gc
import os
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, partial

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
from jax._src import compiler
from recurrent_cases import small_chunks
from selection import of_each

from jaxnorm.core import plan
from jaxnorm.kernels.cpu import build, libraries, loading
from jaxnorm.kernels.pallas import tpu_channels

pytest.register_assert_rewrite("hard", "wide")  # they say what was compared, as tests do
STRICT = (("jax_numpy_dtype_promotion", "strict"), ("jax_numpy_rank_promotion", "raise"))
USUAL = compiler.get_compile_options
for name, value in STRICT:
    jax.config.update(name, value)


def pytest_addoption(parser):
    parser.addoption(
        "--rows",
        type=int,
        metavar="N",
        help="run at most N rows of each test by each implementation",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Limit the rows before marks select tests.

    ``-m slow --rows N`` then leaves out the rows that run without ``-m slow``.
    """
    if config.option.rows:
        items[:], rest = of_each(items, config.option.rows)
        config.hook.pytest_deselected(items=rest)


def pytest_collection_finish():
    """Make Python look for cycles seldom, and only among what the tests make.

    The search through JAX's modules takes a seventh of the time.
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def x64():
    """Enable float64 for one test."""
    context = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with context(True):
        yield


@pytest.fixture(scope="module")
def forgotten():
    """Forget compiled programs before and after a module.

    Its functions have other programs than the same functions elsewhere.
    """
    jax.clear_caches()
    yield
    jax.clear_caches()


# for LLVM, in place of one for each thread
ONE_MODULE = ("xla_cpu_parallel_codegen_split_count", 1)
QUICK = (  # together half of the time to compile, or less
    ONE_MODULE,
    ("xla_backend_optimization_level", 0),
    ("xla_llvm_disable_expensive_passes", True),
    ("xla_cpu_use_fusion_emitters", False),  # gone from JAX 0.12
)


@cache
def is_known(option: tuple[str, object]) -> bool:
    """Return whether this JAX knows a compiler option."""
    try:
        jax.jit(lambda x: x, compiler_options=dict([option]))(0)
    except jax.errors.JaxRuntimeError:
        return False
    return True


@contextmanager
def compiled(*, quickly: bool):
    """Compile quickly, or as users do, within this context.

    Quick compilation skips costly passes, for the many laws in which rounding does not
    matter. Programs that are compiled already stay so.
    """
    options = [option for option in (QUICK if quickly else [ONE_MODULE]) if is_known(option)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", partial(with_options, USUAL, options))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_compile():
    with compiled(quickly=True):
        yield


@pytest.fixture
def quick_compile():
    """Compile quickly for one test among laws of rounding."""
    with compiled(quickly=True):
        yield


def with_options(get: Callable, more: list, *args, **given):
    found = get(*args, **given)
    found.env_option_overrides = [*found.env_option_overrides, *more]
    return found


@contextmanager
def optimized():
    """Compile as users do within this context, and forget compiled programs before and after."""
    jax.clear_caches()
    with compiled(quickly=False):
        yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def usual_compile():
    """Compile as users do, for laws of rounding."""
    with optimized():
        yield


@pytest.fixture
def several_chunks(forgotten, monkeypatch):
    """Run recurrent networks in chunks of three steps, so that short sequences have several."""
    small_chunks(monkeypatch, 3)


@pytest.fixture
def ordinary_promotion():
    """Use JAX's ordinary promotion, since optax and users' code need not be strict."""
    for name, usual in (
        ("jax_numpy_dtype_promotion", "standard"),
        ("jax_numpy_rank_promotion", "allow"),
    ):
        jax.config.update(name, usual)  # not by contexts, which are of one thread
    yield
    for name, strict in STRICT:
        jax.config.update(name, strict)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Return the library of kernels, built once for this run unless it exists.

    Without a compiler the test is skipped.
    """
    if loading.built():
        return libraries.library()
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    try:
        path = build.build(shared)  # workers wait for the first of them, and find its library
    except build.BuildError as error:
        pytest.skip(str(error))
    libraries.load(path)
    return path


@pytest.fixture
def use(library, forgotten, monkeypatch):
    """Return a function that selects what runs where calls name nothing: ``use("native")``."""
    monkeypatch.setattr(loading, "built", lambda: True)
    return partial(monkeypatch.setenv, plan.VARIABLE)


@pytest.fixture
def implementation(request, monkeypatch) -> str:
    """Select the implementation of calls that name none, as :func:`cases.laws` asks.

    The reference is compiled quickly: users run its functions as "xla".
    """
    if request.param == "native":
        request.getfixturevalue("library")
        monkeypatch.setattr(loading, "built", lambda: True)
    if request.param == "pallas":  # as few images and channels as the tests have
        monkeypatch.setattr(tpu_channels, "FEWEST_CHANNELS", 1)
        monkeypatch.setattr(tpu_channels, "FEWEST_IMAGES", 1)
    if request.param == "reference":
        request.getfixturevalue("quick_compile")
    monkeypatch.setenv(plan.VARIABLE, request.param)
    return request.param


@pytest.fixture(scope="class")
def usual_compile_of_class():
    """Compile as users do, for one class or one test."""
    with optimized():
        yield
