"""Trace a model, and find which layer's output each norm reads, and what else reads it."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Literal

from jaxnorm.flax_common.programs import called

# Primitives that return their operand.
_SAME = {"name", "copy", "sharding_constraint"}

_sessions = itertools.count()


class Tags:
    """Name the arrays that enter and leave the modules of one trace.

    Names are unique, so that a program that JAX has kept from another trace shows none of them.
    """

    def __init__(self) -> None:
        self.session = next(_sessions)

    def __call__(self, x: jax.Array, module: int, what: str) -> jax.Array:
        """Return ``x`` by a name: ``what`` of the module, ``"in"``, ``"out"`` or a variable."""
        shape = "x".join(map(str, x.shape))
        return checkpoint_name(x, f"jaxnorm {self.session} {module} {what} {shape}")

    def read(self, eqn: Any) -> tuple[int, str] | None:
        """Return the module and what the equation names, or None if it is no name of this trace."""
        words = str(eqn.params.get("name")).split(" ")
        if eqn.primitive.name != "name" or words[:2] != ["jaxnorm", str(self.session)]:
            return None
        return int(words[2]), words[3]

    def is_batched(self, eqn: Any) -> bool:
        """Return whether ``vmap`` has added an axis to what an equation of this trace names."""
        named = eqn.params["name"].split(" ")[4]
        return named != "x".join(map(str, eqn.invars[0].aval.shape))


@dataclass(frozen=True)
class Step:
    """An equation of a program without calls; values have numbers, literals stay as they are."""

    eqn: Any
    operands: list[Any]
    results: list[int]


@dataclass
class Program:
    """A traced model.

    Attributes:
      inputs: the numbers of the values that are its arguments.
      steps: its equations, in order.
      outputs: what it returns.
      constants: values that the trace has found.
      calls: how often each module runs.
      within: for a module that runs in a loop or a branch, the name of that primitive, or
        "vmap".
      enters: the value that each module reads.
      leaves: the value that each module returns.
      variables: the values of each module's variables, by module and name.
      readers: what reads each value: a module, or the name of a primitive.
      reads: each value that a primitive reads, its name, and the modules that run then.
      maker: the name of the primitive that makes a value.
      made_by: the module that returns a value.
    """

    inputs: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)
    within: dict[int, str] = field(default_factory=dict)
    enters: dict[int, int] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)
    variables: dict[tuple[int, str], int] = field(default_factory=dict)
    readers: dict[int, list[int | str]] = field(default_factory=lambda: defaultdict(list))
    reads: list[tuple[int, str, frozenset[int]]] = field(default_factory=list)
    maker: dict[int, str] = field(default_factory=dict)
    made_by: dict[int, int] = field(default_factory=dict)


def trace(function: Callable[..., Any], tags: Tags, *arguments: Any) -> Program:
    """Return the program of ``function``, whose modules ``tags`` names as it runs."""
    closed = jax.make_jaxpr(function)(*arguments)
    program, numbers = Program(), itertools.count()
    program.inputs = [next(numbers) for _ in closed.jaxpr.invars]
    program.outputs = _inline(closed, program.inputs, program, numbers)
    _connect(program, tags)
    return program


def _inline(
    closed: ClosedJaxpr, operands: Sequence[Any], program: Program, numbers: Iterator[int]
) -> list[Any]:
    """Add the equations of a program, and of the programs that it calls; return its results."""
    jaxpr = getattr(closed, "jaxpr", closed)
    values = dict(zip(jaxpr.invars, operands, strict=True))
    for variable, constant in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
        values[variable] = number = next(numbers)
        program.constants[number] = constant
    read = lambda atom: atom if isinstance(atom, Literal) else values[atom]
    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        if (inner := called(eqn)) is not None:
            results = _inline(inner, given, program, numbers)
        else:
            results = [next(numbers) for _ in eqn.outvars]
            program.steps.append(Step(eqn, given, results))
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _connect(program: Program, tags: Tags) -> None:
    """Fill in what the names say: which module reads and makes which value."""
    same: dict[int, int] = {}  # a value that another one is, by another name
    running: set[int] = set()

    def origin(value: int) -> int:
        return same.get(value, value)

    for step in program.steps:
        given = [origin(value) for value in step.operands if isinstance(value, int)]
        tag = tags.read(step.eqn)
        if tag is not None and tags.is_batched(step.eqn):
            program.within[tag[0]] = "vmap"
        if tag is None and step.eqn.primitive.name in _SAME and given:
            same[step.results[0]] = given[0]
        elif tag is None:
            name = step.eqn.primitive.name
            for value in given:
                program.readers[value].append(name)
                program.reads.append((value, name, frozenset(running)))
            program.maker.update(dict.fromkeys(step.results, name))
            for module in _named_within(step.eqn, tags):
                program.within[module] = name
        elif tag[1] == "in":
            running.add(tag[0])
            program.calls[tag[0]] += 1
            program.enters[tag[0]] = given[0]
            program.readers[given[0]].append(tag[0])
        elif tag[1] == "out":
            running.discard(tag[0])
            program.made_by[step.results[0]] = tag[0]
            program.leaves[tag[0]] = step.results[0]
        else:
            program.variables[tag] = given[0]
    for value in program.outputs:
        if isinstance(value, int):
            program.readers[origin(value)].append("the model's output")
            program.reads.append((origin(value), "the model's output", frozenset()))


def _named_within(eqn: Any, tags: Tags) -> Iterator[int]:
    for value in jax.tree.leaves(list(eqn.params.values())):
        jaxpr = getattr(value, "jaxpr", value)
        for inner in getattr(jaxpr, "eqns", ()):
            if tag := tags.read(inner):
                yield tag[0]
            yield from _named_within(inner, tags)


def evaluate(program: Program, wanted: dict[Any, int], *arguments: Any) -> dict[Any, jax.Array]:
    """Return the values with the numbers ``wanted``, of a model that is called with arguments."""

    @jax.jit
    def run(leaves: list[Any]) -> dict[Any, jax.Array]:
        values = dict(zip(program.inputs, leaves, strict=True)) | program.constants
        for step in program.steps:
            given = [v.val if isinstance(v, Literal) else values[v] for v in step.operands]
            found = step.eqn.primitive.get_bind_params(step.eqn.params)
            # before JAX 0.12 with the functions among them apart
            functions, params = found if isinstance(found, tuple) else ((), found)
            with step.eqn.ctx.manager:
                found = step.eqn.primitive.bind(*functions, *given, **params)
            results = found if step.eqn.primitive.multiple_results else [found]
            values.update(zip(step.results, results, strict=True))
        return {name: values[number] for name, number in wanted.items()}

    return run(jax.tree.leaves(arguments))
