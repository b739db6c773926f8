"""Builds wheels: hatchling's, with the CPU kernels inside for Linux on the machines of
compiler.LEVELS.

This file is both the build back-end, which asks for the headers that the kernels are compiled
against, and hatchling's hook that compiles them. $CXX may name a cross compiler: the wheel is for
the machine that it makes code for. JAXNORM_WHEEL says which wheel is made, "kernels" or "pure"; by
default one with kernels, if there is a compiler, but a pure one where pip installs from sources:
`python -m jaxnorm.kernels` builds for that processor alone, in a third of the time.
"""

import importlib.util
import os
import re
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from hatchling import build as hatchling
from hatchling.build import *  # noqa: F403  (what is not said below)
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
# Its own copy of the C++ library: none of a system, older or newer, is needed. Of both what nothing
# calls is left out.
LINKED = "-s -static-libstdc++ -Wl,--exclude-libs,ALL,--gc-sections"


def load_compiler():
    """jaxnorm/kernels/cpu/compiler.py, without importing jaxnorm, which needs JAX."""
    spec = importlib.util.spec_from_file_location(
        "compiler", ROOT / "jaxnorm" / "kernels" / "cpu" / "compiler.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def oldest_jaxlib() -> str:
    """The version of the oldest jaxlib that is supported, whose headers are taken: XLA refuses
    kernels of headers newer than itself.
    """
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]:
        if found := re.fullmatch(r"jax>=([\d.]+)", requirement):
            return found[1]
    raise ValueError("pyproject.toml must name the oldest JAX that is supported, as jax>=0.7.2.")


def machine(compiler) -> str | None:
    """The machine for which a wheel with kernels is to be made; None: a pure one."""
    choice = os.environ.get("JAXNORM_WHEEL") or (
        "pure" if "PIP_BUILD_TRACKER" in os.environ else "kernels"
    )
    if choice not in ("kernels", "pure"):
        raise ValueError(f"JAXNORM_WHEEL must be kernels or pure: got {choice!r}.")
    name, _, system = compiler.target().partition("-")
    return (
        name
        if choice == "kernels" and name in compiler.LEVELS and system.endswith("linux-gnu")
        else None
    )


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    jaxlib = [f"jaxlib=={oldest_jaxlib()}"] if machine(load_compiler()) else []
    return [*hatchling.get_requires_for_build_wheel(config_settings), *jaxlib]


class Kernels(BuildHookInterface):
    """Compiles them into a wheel."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict) -> None:
        compiler = load_compiler()
        name = version == "standard" and machine(compiler)
        if not name:
            return
        if (installed := metadata.version("jaxlib")) != oldest_jaxlib():
            raise ValueError(
                f"kernels of a wheel are compiled against jaxlib {oldest_jaxlib()}: {installed} is "
                "installed."
            )
        # until the wheel is written, and this object is gone
        self.place = tempfile.TemporaryDirectory()
        try:
            libraries = [self.compile(compiler, name, level) for level in compiler.LEVELS[name]]
        except compiler.BuildError as error:
            self.app.display_warning(f"The wheel is pure, for {error}")
            return
        for path in (*libraries, *map(compiler.check_file, libraries)):
            build_data["force_include"][str(path)] = f"jaxnorm/kernels/cpu/prebuilt/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{max(map(glibc, libraries))}_{name}"

    def compile(self, compiler, name: str, level: str) -> Path:
        folder = Path(self.place.name) / level
        folder.mkdir()
        path, flags = folder / f"cpu-{level}.so", f"{compiler.flags(name, level)} {LINKED}"
        include = Path(importlib.util.find_spec("jaxlib").submodule_search_locations[0]) / "include"
        compiler.compile_kernels(
            path, flags, str(include), lambda line: self.app.display_info(f"{level}: {line}")
        )
        compiler.write_check(path, {"flags": flags, "jaxlib": oldest_jaxlib()})
        return path


def glibc(library: Path) -> int:
    """Minor number of the C library that it needs: the newest of the versions that its symbols
    name.
    """
    return max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes()))
