"""Accelerators that programs are compiled for ahead of time, which takes their compilers and none
of them.
"""

import importlib.metadata
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from bench.peers import wished
from bench.transfers import cycles, kernels
from jaxnorm.core import plan
from jaxnorm.kernels import TABLE, placement

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclass(frozen=True)
class Target:
    """An accelerator.

    Attributes:
      platform: as :attr:`jaxnorm.kernels.Family.platforms` names it.
      topology: describes some of them to JAX.
      compiler: the package that compiles for it.
      install: the command that installs the compiler.
      cost: counts in the text of a program what else tells of its time.
      unit: names the cost in one word, unit_title in more.
      cost_title: the heading of a table of costs.
      relative: whether the table divides the costs by those of Flax.
    """

    platform: str
    topology: dict
    compiler: str
    install: str
    cost: Callable[[str], int]
    unit: str
    unit_title: str
    cost_title: str
    relative: bool = False


TARGETS = {
    "tpu": Target(
        "tpu",
        {"platform": "tpu", "topology_name": "v5e:2x2"},
        "libtpu",
        "pip install 'jax[tpu]'",
        cycles,
        "cycles",
        "cycles that the compiler\n"
        "expects: of a Pallas kernel, those in which memory moves its bytes",
        "Cycles that the compiler expects, in the same order, relative to Flax",
        relative=True,
    ),
    "gpu": Target(
        "gpu",
        {"platform": "cuda", "topology": "1x1x4", "target_config": H100},
        "jax-cuda12-pjrt",
        "pip install --no-deps jax-cuda12-{plugin,pjrt} nvidia-{cuda-nvcc,nvjitlink}-cu12",
        kernels,
        "kernels",
        "kernels that it starts",
        "Kernels that it starts, for the output / the output and all gradients",
    ),
}


class NoCompilerError(Exception):
    """No compiler for a target can be used here."""


@contextmanager
def compiling_for(target: Target) -> Iterator[list]:
    """Give the devices of a target, for whose platform jaxnorm plans within.

    Raises:
      NoCompilerError: says why, and how to install the compiler.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no service to ask about a TPU
    before = placement.platform
    try:
        jax.devices()  # looks for plug-ins
        devices = topologies.get_topology_desc(**target.topology).devices
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split())
        how = f"no compiler for a {target.platform} ({target.install}): {why}"
        raise NoCompilerError(how) from error
    placement.platform = lambda: target.platform  # type: ignore[assignment]
    jax.clear_caches()  # what was traced for another platform
    try:
        yield devices
    finally:
        placement.platform = before  # type: ignore[assignment]
        jax.clear_caches()


def compiled(function: Callable, *types) -> jax.stages.Compiled:
    """Compile a function for the device on which its arguments are said to lie."""
    return jax.jit(function).trace(*types).lower().compile()


def version(target: Target) -> str:
    """Return the version of the compiler."""
    return importlib.metadata.version(target.compiler)


def kernels_for(platform: str) -> str | None:
    """Return the name of the kernels that norms are to take on a platform; None if it has none.

    It is the name that JAXNORM_IMPLEMENTATION has, if they are for this platform, or else the
    first in the table.
    """
    names = [
        name
        for name, family in TABLE.items()
        if platform in family.platforms and "norm" in family.modules
    ]
    asked = plan.from_environment()
    return asked if asked in names else next(iter(names), None)


def asked_by(peer: str, platform: str) -> AbstractContextManager[None]:
    """Return the context in which the norms of "jaxnorm" take the kernels of a platform."""
    return wished(kernels_for(platform) if peer == "jaxnorm" else None)
