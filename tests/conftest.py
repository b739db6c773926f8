"""Every test runs with strict dtype and rank promotion, on eight host devices."""

import os
from functools import partial

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
from jax._src import compiler
from recurrent_cases import small_chunks

from jaxnorm import kernels
from jaxnorm.engine import plan
from jaxnorm.kernels import build, libraries, native

STRICT = (("jax_numpy_dtype_promotion", "strict"), ("jax_numpy_rank_promotion", "raise"))
for name, strict in STRICT:
    jax.config.update(name, strict)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def x64():
    """float64 for one test."""
    context = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with context(True):
        yield


OLDER_FUSION = ("xla_cpu_use_fusion_emitters", False)  # a third of the time to compile; gone from JAX 0.12


@pytest.fixture(scope="session")
def quick_options() -> list:
    """What of it this JAX takes."""
    try:
        jax.jit(lambda x: x, compiler_options=dict([OLDER_FUSION]))(0)
    except jax.errors.JaxRuntimeError:
        return []
    return [OLDER_FUSION]


@pytest.fixture(scope="module")
def quick_compile(quick_options):
    """Machine code without costly passes, for laws in which rounding has no say.

    What was compiled is forgotten before and after the module: to the last bit, only code of one kind is alike.
    """
    usual = compiler.get_compile_options

    def quick(*args, **options):
        result = usual(*args, **options)
        result.env_option_overrides = [*result.env_option_overrides, *quick_options]
        return result

    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", quick)
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture
def several_chunks(monkeypatch):
    """Recurrent networks in chunks of three steps, so that short sequences have several."""
    small_chunks(monkeypatch, 3)


@pytest.fixture
def ordinary_promotion():
    """The library is strict; optax and the user's own code need not be."""
    for name, usual in (("jax_numpy_dtype_promotion", "standard"), ("jax_numpy_rank_promotion", "allow")):
        jax.config.update(name, usual)  # not by contexts, which are of one thread
    yield
    for name, strict in STRICT:
        jax.config.update(name, strict)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The kernels, built once for this run unless they are already; without a compiler there are none to test."""
    if kernels.built():
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
def use(library, monkeypatch):
    """``use("native")`` chooses the implementation of calls that say none."""
    monkeypatch.setattr(kernels, "built", lambda: True)
    return partial(monkeypatch.setenv, plan.VARIABLE)


@pytest.fixture(scope="class")
def by_xla():
    """The output of sets of whatever size by XLA, of statistics from the kernel, as that of many positions."""
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "CHANNEL", 4)
        yield
    jax.clear_caches()
