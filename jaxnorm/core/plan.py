"""Which implementation runs: the one place that decides it, and says why no other does."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import jax

from jaxnorm import kernels
from jaxnorm.arguments.axes import is_static, rough_product
from jaxnorm.engine.invariant import FixedOrderLoops
from jaxnorm.engine.loops import PlainLoops
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.engine.xla import XlaCpuLoops, XlaTpuLoops
from jaxnorm.kernels import PLAIN, Family, placement

# The module of both implementations in plain JAX, loaded when it first runs. "xla" adds
# optimization barriers, merged axes and recomputed statistics.
PLAIN_JAX = "jaxnorm.engine.derivatives"
VARIABLE = "JAXNORM_IMPLEMENTATION"
# From so many rows on, XLA's CPU back-end makes one loop of everything that is done with a row.
MANY_GROUPS = 4096
# On an accelerator the shift of a group is the mean of one in so many of its elements. Compiled
# for a TPU v5e, statistics then read 1 + 1/8 of x, instead of 2; the worst data lose 3 bits.
SAMPLE = 8
# From this version of JAX on, a branch that is not taken costs less than a sample. Compiled for a
# v5e, batch norm after a convolution in bfloat16 takes 1.01 of Flax's cycles by JAX 0.12, 1.10 by
# 0.10, and 2.32 by 0.7.2, where a sample takes 1.35.
BRANCHES = (0, 10)
SLOWER = "it takes as long or longer, for the same result"
NOUNS: dict[str | None, str] = {"moments": "statistics alone", "lstm": "this network"}
# Elements of a group: with fewer, storing the low part of the mean costs more than recomputing
# it.
SMALL_GROUP = 256


@dataclass(frozen=True)
class Plan:
    """The implementation that runs, and why no other does. It prints itself.

    Attributes:
      implementation: the name of what runs.
      others: maps the name of each other implementation to the reason, in words, why it does not
        run.
      derivative: how reverse mode computes the gradients, in words; empty where nobody asked.
    """

    implementation: str
    others: Mapping[str, str] = field(hash=False)
    derivative: str = ""

    def __repr__(self) -> str:
        return "\n".join(
            [
                self.implementation,
                *([f"  gradients: {self.derivative}"] if self.derivative else []),
                *(f"  not {name}: {reason}" for name, reason in self.others.items()),
            ]
        )


def select(requested: str | None, operation: str | None, x: jax.Array, *arguments) -> Plan:
    """Return which implementation runs.

    Args:
      requested: by the caller; None for the rule.
      operation: a key of :attr:`jaxnorm.kernels.Family.modules`; None for what no kernel computes.
        ``obstacle(x, *arguments)`` of a module says in words why its kernels cannot take these, or
        None if they can.
      x: the data, whose shape and placement on devices are asked about.
      *arguments: what the operation takes besides x.

    Raises:
      ValueError: an unknown name, or one that cannot take these arguments.
    """
    names = kernels.names()
    if requested is not None and requested not in names:
        listed = ", ".join(map(repr, names[:-1]))
        raise ValueError(
            f"implementation must be None, {listed} or {names[-1]!r}: got {requested!r}."
        )
    # most programs do not set the variable, and this is asked at every call
    named = requested or (from_environment() if os.environ.get(VARIABLE) else None)
    if named is None:
        return _by_rule(operation, x, arguments)
    asked = f"implementation={named!r} is asked for"
    why = asked if requested else f"{VARIABLE}={named} asks for {named}"
    others = {other: why for other in names if other != named}
    if named in PLAIN:
        return Plan(named, others)
    reason = _obstacle(kernels.TABLE[named], operation, x, arguments)
    if reason is None:
        return Plan(named, others)
    if requested:
        raise ValueError(f"implementation={named!r} {reason}. Leave implementation out.")
    others = {name: each for name, each in others.items() if name not in PLAIN}
    return Plan("xla", {"reference": SLOWER, **others, named: reason})


def _by_rule(operation: str | None, x: jax.Array, arguments: tuple) -> Plan:
    """Return the first kernels of the table that take these arguments, or plain JAX."""
    reasons: dict[str, str] = {}
    chosen = None
    for name, family in kernels.TABLE.items():
        reason = _left_aside(family, x)
        if reason is None and chosen is not None:
            reason = f"{chosen} comes first in the table of kernels"
        reason = reason or _obstacle(family, operation, x, arguments)
        if reason is None:
            chosen = name
        else:
            reasons[name] = reason
    if chosen is None:
        return Plan("xla", {"reference": SLOWER, **reasons})
    return Plan(chosen, {**dict.fromkeys(PLAIN, "a kernel takes these arguments"), **reasons})


def _left_aside(family: Family, x: jax.Array) -> str | None:
    """Return why kernels are not considered unless they are named."""
    if placement.platform() not in family.platforms:
        own = {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPUs"}
        written_for = " and ".join(own[each] for each in family.platforms)
        return f"JAX runs on platform {placement.platform()}, and the kernels are for {written_for}"
    if is_static(x.shape) and not placement.known(x):
        return "there are several devices, and x may lie on any of them"
    return family.only_by_name or None


def _obstacle(family: Family, operation: str | None, x: jax.Array, arguments: tuple) -> str | None:
    """Return why the kernels of a family cannot take these arguments."""
    if operation is None or operation not in family.modules:
        return f"has no kernel for {NOUNS.get(operation, 'this norm')}"
    if not is_static(x.shape):
        return f"takes no symbolic sizes: got {x.shape}"
    if reason := family.load():
        return reason
    try:
        module = import_module(family.modules[operation])
    except ImportError as error:
        return f"cannot be imported: {error}"
    return module.obstacle(x, *arguments)


def forward(
    implementation: str, spec: Spec, operands: Operands, *, moments: bool
) -> tuple[jax.Array, Any]:
    """Return the output and, if asked for, the Stats, by what :func:`select` names."""
    _, where, scale, bias, *_ = operands
    if implementation in PLAIN:
        loops = loops_for(spec, implementation, where, scale, bias)
        return import_module(PLAIN_JAX).forward(loops, operands)
    module = import_module(kernels.TABLE[implementation].modules["norm"])
    return module.forward(loops_of_kernels(spec), operands, moments=moments)


def forward_of_sum(
    implementation: str, spec: Spec, operands: Operands, residual: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the output for x + residual, and this sum, by what :func:`select` names.

    Where its kernels do not add, the sum is a step of its own.
    """
    x, family = operands.x, kernels.TABLE.get(implementation)
    if family and "add_norm" in family.modules and jax.typeof(x) == jax.typeof(residual):
        module = import_module(family.modules["add_norm"])
        if placement.platform() in module.platforms:
            return module.forward(loops_of_kernels(spec), operands, residual)
    total = x + residual
    y, _ = forward(implementation, spec, operands._replace(x=total), moments=False)
    return y, total


def describe_derivative(implementation: str, spec: Spec, operands: Operands) -> str:
    """Say in words how reverse mode of :func:`forward` computes the gradients."""
    if implementation in PLAIN:
        _, where, scale, bias, *_ = operands
        loops = loops_for(spec, implementation, where, scale, bias)
        return import_module(PLAIN_JAX).describe(loops, operands)
    module = import_module(kernels.TABLE[implementation].modules["norm"])
    # a module need not say it
    return (
        module.derivative(placement.platform()) if hasattr(module, "derivative") else "its own rule"
    )


def find_stats(spec: Spec, x, where, implementation: str, scatter_indices=None) -> Any:
    """Return the Stats, by what :func:`select` names; of segments, if scatter indices are given."""
    if implementation not in PLAIN:
        module = import_module(kernels.TABLE[implementation].modules["moments"])
        return module.statistics(loops_of_kernels(spec), x, where)
    loops = loops_for(spec, implementation, where)
    return import_module(PLAIN_JAX).statistics(loops, x, where, scatter_indices)


def loops_of_kernels(spec: Spec) -> PlainLoops:
    """Return the loops of the plain formulas that take over what a kernel has found.

    They take any shift and scale exponent, since a kernel chooses its own.
    """
    if spec.batch_invariant:
        return FixedOrderLoops(spec)
    return XlaCpuLoops(spec) if placement.platform() == "cpu" else PlainLoops(spec)


def usual_loops(spec: Spec) -> PlainLoops:
    """Return the loops of this platform, as they are by default: those that cost no digits."""
    if spec.batch_invariant:
        return FixedOrderLoops(spec)
    if placement.platform() == "cpu":
        return XlaCpuLoops(spec)
    loops = XlaTpuLoops(spec) if placement.platform() == "tpu" else PlainLoops(spec)
    in_one_read = replace(loops, coarse="squares", sample=SAMPLE)
    # A GPU makes one kernel of all passes over a row, but not where one of them reads a part of it.
    # Where it also writes the statistics, for gradients, each pass is a kernel and reads the row.
    if placement.platform() == "gpu" and spec.reduces_trailing_axes:
        return replace(loops, coarse="largest", derivatives=in_one_read)
    # A TPU branches at no cost. Groups that span the examples are whole on each device, or summed
    # over devices: these agree on a branch without a collective of its own.
    branches = placement.platform() == "tpu" and jax.__version_info__ >= BRANCHES
    near_zero = branches and 0 in spec.axes
    return replace(in_one_read, near_zero=near_zero)


def loops_for(spec: Spec, implementation: str, where, scale=None, bias=None) -> PlainLoops:
    """Return the loops that plain JAX takes.

    "reference", segments and batch-invariant norms take the usual loops. On a CPU, "xla" takes
    loops that

    - recompute statistics in backward, in a fused loop for each gradient, for rows whose scale and
      bias are absent or differ at every element;
    - have optimization barriers between passes, but for MANY_GROUPS rows or more without a mask
      within rows, whose passes XLA fuses by itself;
    - merge a split last axis, but for rows: group norm then takes as long as instance norm.
    """
    loops = usual_loops(spec)
    if implementation == "reference" or spec.segments is not None or spec.batch_invariant:
        return loops
    reduction, shared = spec.reduction, spec.shared_axes(scale, bias)
    group_size = rough_product(reduction.group_size)
    # where a sample gives the shift, the low part is as large as the shift's distance from the mean
    keep_low_mean = bool(loops.sample) or not spec.centered or group_size >= SMALL_GROUP
    if not isinstance(loops, XlaCpuLoops):
        return replace(loops, keep_low_mean=keep_low_mean)
    alike = rough_product(*(reduction.split_shape[axis] for axis in shared))
    recompute = spec.reduces_trailing_axes and (scale is bias is None or alike <= 1)
    in_one_loop = (
        spec.reduces_trailing_axes
        and spec.treats_groups_alike(where)
        and rough_product(*reduction.split_stats_shape) >= MANY_GROUPS
    )
    merge_last_axis = not spec.reduces_trailing_axes and len(reduction.parts[-1]) > 1
    return replace(
        loops,
        recompute=recompute,
        keep_low_mean=keep_low_mean,
        barriers=not in_one_loop,
        merge_last_axis=merge_last_axis,
    )


def is_tpu() -> bool:
    """Return whether programs are made for TPUs, on which networks have loops of their own."""
    return placement.platform() == "tpu"


def from_environment() -> str | None:
    """Return the implementation that the environment variable names; None where it is blank.

    Raises:
      ValueError: an unknown name.
    """
    name = os.environ.get(VARIABLE, "").strip() or None
    if name not in (None, *kernels.names()):
        listed = ", ".join(kernels.names())
        raise ValueError(f"{VARIABLE} must be one of {listed}: got {name!r}.")
    return name
