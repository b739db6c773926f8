"""Test libraries of CPU kernels that are damaged, unsuitable, or set aside.

The tests check what happens to them and what is reported.
"""

import json
import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import bit_generator

import jaxnorm as jn
from jaxnorm.core import plan
from jaxnorm.kernels.__main__ import main
from jaxnorm.kernels.cpu import compiler, libraries, loading

SHARED = Path(bit_generator.__file__)  # some library


@pytest.fixture(autouse=True)
def _none_prebuilt(tmp_path, monkeypatch):
    """Whatever the installed wheel has."""
    monkeypatch.setattr(libraries, "PREBUILT", tmp_path / "prebuilt")


@pytest.fixture
def found(tmp_path, monkeypatch):
    """A library, none of whose functions is a kernel, in the place of the kernels, with its check
    file.
    """
    path = libraries.library(tmp_path)
    path.write_bytes(SHARED.read_bytes())
    compiler.write_check(path, {})
    monkeypatch.setattr(libraries, "library", lambda folder=None: path)
    monkeypatch.delenv(plan.VARIABLE, raising=False)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    loading.built.cache_clear()
    yield path
    loading.built.cache_clear()


@pytest.fixture
def whole(found, monkeypatch):
    """As if all its functions were kernels."""
    monkeypatch.setattr(libraries, "KERNELS", ("PyInit_bit_generator",))
    return found


SIZE = SHARED.stat().st_size
LACKS = (
    "lacks JaxnormForward, JaxnormStatistics, JaxnormBackward, JaxnormLstmForward, "
    "JaxnormLstmBackward"
)
DAMAGED = {
    "cut short": (
        lambda path: os.truncate(path, 5000),
        f"is damaged: it has 5000 bytes, and {SIZE} were built",
    ),
    "empty": (
        lambda path: path.write_bytes(b""),
        f"is damaged: it has 0 bytes, and {SIZE} were built",
    ),
    "other bytes": (
        lambda path: path.write_bytes(bytes(SIZE)),
        "is damaged: its bytes are not those that were built",
    ),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read (Is a directory)"),
    "unchecked": (lambda path: path.with_suffix(".json").unlink(), "lacks its check file {check}"),
    "damaged check": (
        lambda path: path.with_suffix(".json").write_text("{"),
        "has a check file, {check}, that cannot be read",
    ),
    "other check": (
        lambda path: path.with_suffix(".json").write_text("[]"),
        "has a check file, {check}, that cannot be read",
    ),
    "no kernels": (lambda path: None, LACKS),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_libraries_are_left_out(kind, found, rng, capsys):
    damage, words = DAMAGED[kind]
    damage(found)
    words = f"{found} {words.format(check=found.with_suffix('.json').name)}"
    x = jnp.asarray(rng.standard_normal((2, 3)), jnp.float32)
    with pytest.warns(RuntimeWarning) as told:
        y = jn.standardize(x, 1)
    assert [str(warning.message) for warning in told] == [
        f"jaxnorm computes in plain JAX, for {words}; rebuild the kernels: python -m "
        "jaxnorm.kernels"
    ]
    np.testing.assert_array_equal(y, jn.standardize(x, 1, implementation="xla"))
    # and no second warning, which were an error
    np.testing.assert_array_equal(y, jn.standardize(x, 1))
    with pytest.raises(ValueError, match="implementation='native' must be rebuilt") as error:
        jn.standardize(x, 1, implementation="native")
    assert str(error.value) == (
        f"implementation='native' must be rebuilt, for {words}: python -m jaxnorm.kernels. Leave "
        "implementation out."
    )
    assert main(["--status"], found.parent) == 1
    assert (
        capsys.readouterr().out
        == f"Not active: {words}, to be rebuilt with python -m jaxnorm.kernels.\n"
    )


def test_bytes_that_are_no_library(found):
    found.write_text("no library")
    compiler.write_check(found, {})
    with pytest.raises(libraries.DamagedError, match="cannot be opened"):
        libraries.load(found)


def test_all_kernels_are_made_known_or_none(found, monkeypatch):
    registered = []
    monkeypatch.setattr(
        jax.ffi, "register_ffi_target", lambda name, *_, **__: registered.append(name)
    )
    monkeypatch.setattr(libraries, "KERNELS", ("PyInit_bit_generator", "JaxnormForward"))
    with pytest.raises(libraries.DamagedError, match=r"^lacks JaxnormForward$"):
        libraries.load(found)
    assert registered == []
    monkeypatch.setattr(libraries, "KERNELS", ("PyInit_bit_generator",))
    libraries.load(found)
    assert registered == ["PyInit_bit_generator"]


# in short
LEVELS = {"x86-64-v4": "avx avx2 avx512f", "x86-64-v3": "avx avx2", "x86-64-v2": "ssse3"}
PREBUILT = [f"cpu-{level}.so" for level in LEVELS]


@pytest.fixture
def wheel(whole, monkeypatch):
    """What a wheel brings, of which this processor can run all but the first; and the user's own
    library, ``whole``.
    """
    monkeypatch.setattr(libraries, "LEVELS", {libraries.facts()["machine"]: LEVELS})
    monkeypatch.setattr(
        libraries,
        "facts",
        lambda: {
            "machine": libraries.platform.machine(),
            "features": "fpu ssse3 avx avx2 avx512bw",
        },
    )
    libraries.PREBUILT.mkdir()
    for name in PREBUILT:
        (libraries.PREBUILT / name).write_bytes(SHARED.read_bytes())
        compiler.write_check(libraries.PREBUILT / name, {})
    libraries.load.cache_clear()
    yield libraries.PREBUILT
    libraries.load.cache_clear()


class TestWheel:
    """Libraries of a wheel: for levels of processor."""

    @pytest.fixture
    def loaded(self, monkeypatch):
        """What becomes known to JAX: a path for each library."""
        opened = []
        monkeypatch.setattr(
            libraries,
            "functions",
            lambda path, real=libraries.functions: (real(path), opened.append(path))[0],
        )
        monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
        return opened

    def test_the_users_own_is_taken_first(self, wheel, whole, loaded):
        assert libraries.candidates() == [
            whole,
            wheel / "cpu-x86-64-v3.so",
            wheel / "cpu-x86-64-v2.so",
        ]
        assert loading.built()
        assert loaded == [whole]

    def test_without_one_the_fastest_that_this_processor_can_run(
        self, wheel, whole, loaded, capsys
    ):
        whole.unlink()
        before = (wheel / PREBUILT[1]).stat().st_mtime_ns
        assert loading.built()
        assert loaded == [wheel / PREBUILT[1]]
        # nothing is written where jaxnorm is installed
        assert (wheel / PREBUILT[1]).stat().st_mtime_ns == before
        assert main(["--status"], whole.parent) == 0
        assert capsys.readouterr().out == f"Active: {wheel / PREBUILT[1]}\n"

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_the_next_is_taken_after_damaged_ones(self, count, wheel, whole, loaded, capsys):
        paths = [whole, wheel / PREBUILT[1], wheel / PREBUILT[2]]
        for path in paths[:count]:
            os.truncate(path, 5000)
        intact = paths[count] if count < 3 else None
        faults = " and ".join(
            f"{path} is damaged: it has 5000 bytes, and {SIZE} were built" for path in paths[:count]
        )
        with pytest.warns(RuntimeWarning) as told:
            assert loading.built() == bool(intact)
        instead = f"uses {intact}" if intact else "computes in plain JAX"
        assert [str(warning.message) for warning in told] == [
            f"jaxnorm {instead}, for {faults}; rebuild the kernels: python -m jaxnorm.kernels"
        ]
        assert loading.built() == bool(intact)  # and no second warning, which were an error
        assert loaded == [intact] * bool(intact)
        assert main(["--status"], whole.parent) == (0 if intact else 1)
        words = (
            f"Active: {intact}"
            if intact
            else f"Not active: {faults}, to be rebuilt with python -m jaxnorm.kernels."
        )
        assert capsys.readouterr().out == f"{words}\n"

    def test_the_next_is_taken_after_one_that_xla_refuses(self, wheel, whole, loaded, monkeypatch):
        def refuse(*_, **__):
            if loaded == [whole]:
                raise jax.errors.JaxRuntimeError("its version (0.2) is incompatible")

        monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
        words = (
            rf"for {whole} is refused by jaxlib \S+ \(its version \(0\.2\) is incompatible\); "
            rf"rebuild the kernels"
        )
        with pytest.warns(RuntimeWarning, match=rf"jaxnorm uses {wheel / PREBUILT[1]}, {words}"):
            assert loading.built()
        assert loaded == [whole, wheel / PREBUILT[1]]

    def test_none_for_another_machine(self, wheel, monkeypatch):
        monkeypatch.setattr(libraries.platform, "machine", lambda: "ppc64le")
        assert libraries.prebuilt() == []

    def test_levels_are_those_of_the_system_v_abi(self):
        """Each contains the one below; what this processor can do has the words of the list."""
        v4, v3, v2 = (set(needed.split()) for needed in compiler.LEVELS["x86_64"].values())
        assert v2 < v3 < v4
        assert (len(v2), len(v3), len(v4)) == (7, 15, 20)


def test_unknown_names_and_kernels_that_are_not_built(monkeypatch):
    monkeypatch.setenv(plan.VARIABLE, "cuda")
    with pytest.raises(
        ValueError,
        match="JAXNORM_IMPLEMENTATION must be one of reference, xla, native, pallas: got 'cuda'",
    ):
        jn.layer_norm(jnp.ones((2, 3)))
    monkeypatch.setattr(loading, "built", lambda: False)
    with pytest.raises(ValueError, match=r"must be built first: python -m jaxnorm\.kernels"):
        jn.standardize(jnp.ones((2, 3)), 1, implementation="native")


@pytest.mark.parametrize("built", [True, False])
def test_switchable_norm_has_no_kernel(built, monkeypatch):
    """Built or not; where native is only the usual choice, it is left out."""
    monkeypatch.setattr(loading, "built", lambda: built)
    norm = partial(
        jn.switchable_norm, jnp.arange(24.0).reshape(2, 3, 4), jnp.zeros(3), jnp.zeros(3)
    )
    with pytest.raises(ValueError, match="implementation") as error:
        norm(implementation="native")
    assert (
        str(error.value)
        == "implementation='native' has no kernel for this norm. Leave implementation out."
    )
    y = norm(implementation="xla")[0]
    for wish in ("native", "xla"):
        monkeypatch.setenv(plan.VARIABLE, wish)
        np.testing.assert_array_equal(norm()[0], y)


@pytest.mark.parametrize("blank", ["", " \t"])
def test_a_blank_variable_is_not_set(blank, monkeypatch):
    x = jnp.arange(6.0).reshape(2, 3)
    monkeypatch.delenv(plan.VARIABLE, raising=False)
    expected = jn.layer_norm(x)
    monkeypatch.setenv(plan.VARIABLE, blank)
    np.testing.assert_array_equal(jn.layer_norm(x), expected)
    assert plan.from_environment() is None


class TestStatus:
    def told(self, folder, capsys):
        status = main(["--status"], folder)
        return status, capsys.readouterr().out

    def test_active(self, whole, capsys):
        assert self.told(whole.parent, capsys) == (0, f"Active: {whole}\n")

    def test_never_built(self, tmp_path, monkeypatch, capsys):
        monkeypatch.delenv(plan.VARIABLE, raising=False)
        words = f"Not active: never built in {tmp_path}, which python -m jaxnorm.kernels does.\n"
        assert self.told(tmp_path, capsys) == (1, words)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"jaxlib": "0.1.2"}, f"jaxlib 0.1.2 (this is {libraries.facts()['jaxlib']})"),
            ({"features": "mmx", "processor": "Pentium"}, "another processor (Pentium)"),
            (
                {"machine": "ppc", "features": "", "processor": "PowerPC"},
                "another processor (PowerPC)",
            ),
            (
                {"sources": "", "flags": "-O0"},
                "another version of jaxnorm and other compiler flags",
            ),
            (None, "another jaxlib, processor or version of jaxnorm"),
        ],
    )
    def test_built_for_another(self, change, words, tmp_path, monkeypatch, capsys):
        monkeypatch.delenv(plan.VARIABLE, raising=False)
        other = tmp_path / "cpu-0123456789abcdef.so"
        other.touch()
        if change:
            other.with_suffix(".json").write_text(
                json.dumps({**libraries.facts(), "processor": "", **change})
            )
        words = (
            f"Not active: {other} is built for {words}, to be rebuilt with python -m "
            "jaxnorm.kernels.\n"
        )
        assert self.told(tmp_path, capsys) == (1, words)

    @pytest.mark.parametrize(
        ("wish", "platform", "words"),
        [
            ("xla", "cpu", "left aside by JAXNORM_IMPLEMENTATION=xla"),
            (
                "cuda",
                "cpu",
                "JAXNORM_IMPLEMENTATION must be one of reference, xla, native, pallas: got 'cuda'",
            ),
            ("", "gpu", "JAX runs on platform gpu, and they are for cpu"),
        ],
    )
    def test_left_aside(self, wish, platform, words, whole, capsys, monkeypatch):
        monkeypatch.setenv(plan.VARIABLE, wish)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        assert self.told(whole.parent, capsys) == (1, f"Not active: {words}.\n")

    @pytest.mark.parametrize(
        "error", [RuntimeError("Unable to initialize backend"), AssertionError()], ids=repr
    )
    def test_a_platform_that_is_not_there(self, error, whole, capsys, monkeypatch):
        """JAX raises the one where it is there but fails, the other where nothing is installed for
        it.
        """

        def fail():
            raise error

        monkeypatch.setattr(jax, "default_backend", fail)
        assert self.told(whole.parent, capsys) == (
            1,
            f"Not active: JAX cannot run on {jax.config.jax_platforms}.\n",
        )
