"""Which implementation runs: the one place that decides it, and says why no other does."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import jax

from jaxnorm import kernels
from jaxnorm.axes import is_static, rough_product
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels import libraries
from jaxnorm.kernels.placement import known

# plain JAX: without and with separate passes, joined axes and recomputed statistics
PLAIN = ("reference", "xla")
# The modules of implementations, which are loaded when one first runs. Kernels are considered in
# this order.
PLAIN_JAX, NORM_KERNELS = "jaxnorm.engine.derivatives", {"native": "jaxnorm.kernels.native"}
IMPLEMENTATIONS = (*PLAIN, *NORM_KERNELS)
VARIABLE = "JAXNORM_IMPLEMENTATION"
MANY_GROUPS = 4096  # from it on XLA's CPU back-end makes one loop of all that is done with a row
SMALL_GROUP = 256  # elements: with fewer, storing the offset costs more than recomputing it


@dataclass(frozen=True)
class Plan:
    """What runs, and why nothing else does. It prints itself.

    Attributes:
      implementation: the name of what runs.
      others: maps the name of each other implementation to the reason, in words, why it does not
        run.
    """

    implementation: str
    others: Mapping[str, str] = field(hash=False)

    def __repr__(self) -> str:
        return "\n".join(
            [
                self.implementation,
                *(f"  not {name}: {reason}" for name, reason in self.others.items()),
            ]
        )


def select(requested: str | None, modules: Mapping[str, str], x: jax.Array, *arguments) -> Plan:
    """Which implementation runs.

    Args:
      requested: by the caller; None for the rule.
      modules: of kernels, by the name of the implementation, each imported only if need be;
        ``obstacle(x, *arguments)`` of one says in words why its kernels cannot take these, or None
        if they can.
      x: the data, whose shape and placement on devices are asked about.

    Raises:
      ValueError: an unknown name, or one that cannot take these arguments.
    """
    if requested not in (None, *IMPLEMENTATIONS):
        names = ", ".join(map(repr, IMPLEMENTATIONS[:-1]))
        raise ValueError(
            f"implementation must be None, {names} or {IMPLEMENTATIONS[-1]!r}: got {requested!r}."
        )
    named = requested or from_environment()
    if named in PLAIN:
        return _plan(
            named,
            f"implementation={named!r} is asked for"
            if requested
            else f"{VARIABLE}={named} asks for {named}",
        )
    reasons: dict[str, str] = {}
    for name in NORM_KERNELS if named is None else (named,):
        reason = (named is None and _left_aside(x)) or _obstacle(modules.get(name), x, arguments)
        if not reason:
            return Plan(name, {**_plan(name, "a kernel takes these arguments").others, **reasons})
        if requested:
            raise ValueError(f"implementation={name!r} {reason}. Leave implementation out.")
        reasons[name] = reason
    return Plan("xla", {"reference": "it takes as long or longer, for the same result", **reasons})


def _plan(name: str, reason: str) -> Plan:
    """``reason`` is why nothing else runs."""
    return Plan(name, {other: reason for other in IMPLEMENTATIONS if other != name})


def _left_aside(x: jax.Array) -> str | None:
    """Why kernels are not considered at all."""
    if (platform := jax.default_backend()) != "cpu":
        return f"JAX runs on platform {platform}, and the kernels are for CPUs"
    if is_static(x.shape) and not known(x):
        return "there are several devices, and x may lie on any of them"
    return None


def _obstacle(module: str | None, x: jax.Array, arguments: tuple) -> str | None:
    """Why the kernels of a module cannot take these arguments."""
    if module is None:
        return "has no kernel for this norm"
    if not is_static(x.shape):
        return f"takes no symbolic sizes: got {x.shape}"
    if kernels.built():
        return import_module(module).obstacle(x, *arguments)
    path = libraries.library()
    fault = libraries.fault(path)
    return (
        f"must be rebuilt, for {path} {fault}: {libraries.BUILD}"
        if fault
        else f"must be built first: {libraries.BUILD}"
    )


def forward(
    implementation: str, spec: Spec, operands: Operands, *, moments: bool
) -> tuple[jax.Array, Any]:
    """The output and, if asked for, the Stats, by what :func:`select` names."""
    _, where, scale, bias, *_ = operands
    if implementation in PLAIN:
        return import_module(PLAIN_JAX).forward(
            for_plain_jax(spec, implementation, where, scale, bias), operands
        )
    return import_module(NORM_KERNELS[implementation]).forward(spec, operands, moments=moments)


def find_stats(spec: Spec, x, where, implementation: str = "xla", places=None) -> Any:
    """The Stats, in plain JAX; of segments, if there are places."""
    return import_module(PLAIN_JAX).statistics(
        for_plain_jax(spec, implementation, where), x, where, places
    )


def for_plain_jax(spec: Spec, implementation: str, where, scale=None, bias=None) -> Spec:
    """The spec with what plain JAX does for XLA's loops over x: nothing for "reference", and for
    segments.

    Backward recomputes, in a fused loop for each gradient, for rows whose scale and bias are absent
    or differ at every element. XLA fuses the passes by itself over MANY_GROUPS rows or more without
    a mask within rows; all others are separated. A split last axis that is not of rows is joined,
    for loops as fast as those of instance norm.
    """
    if implementation == "reference" or spec.segments is not None:
        return spec
    reduction, shared = spec.reduction, spec.shared_axes(scale, bias)
    alike = rough_product(*(reduction.split_shape[axis] for axis in shared))
    recompute = spec.in_rows and (scale is bias is None or alike <= 1)
    in_one_loop = (
        spec.in_rows
        and spec.is_of_groups(where)
        and rough_product(*reduction.split_stats_shape) >= MANY_GROUPS
    )
    joined = not spec.in_rows and len(reduction.parts[-1]) > 1
    keep_offset = not spec.centered or rough_product(reduction.group_size) >= SMALL_GROUP
    return replace(
        spec, separate=not in_one_loop, joined=joined, recompute=recompute, keep_offset=keep_offset
    )


def from_environment() -> str | None:
    """What the variable names; None where it is not set, or blank.

    Raises:
      ValueError: an unknown name.
    """
    name = os.environ.get(VARIABLE, "").strip() or None
    if name not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"{VARIABLE} must be one of {', '.join(IMPLEMENTATIONS)}: got {name!r}.")
    return name
