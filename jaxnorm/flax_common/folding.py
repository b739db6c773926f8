"""Fold norms into the layers before or after them: the decisions and the algebra."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxnorm.flax_common.absorption import Weights, affine, condition, default_bound, into
from jaxnorm.flax_common.layers import Layer, Norm
from jaxnorm.flax_common.surgery import Report, Row, difference, double
from jaxnorm.flax_common.tracing import Program, evaluate

_KINDS = ("module", "result")


@dataclass(frozen=True)
class Fold:
    """A norm, and the layer before it or the layers after it that take it over."""

    norm: int
    layers: tuple[int, ...]
    before: bool


@dataclass
class Graph:
    """The layers and norms of a traced model, by their numbers."""

    program: Program
    layers: dict[int, Layer] = field(default_factory=dict)
    norms: dict[int, Norm] = field(default_factory=dict)

    def fold_of(self, norm: int) -> Fold | str:
        """Return how a norm can be folded, or why it cannot."""
        about = self.norms[norm]
        if why := about.unsupported or self._obstacle(norm):
            return why
        before = self._before(norm) if about.linear else ""
        if isinstance(before, Fold):
            return before
        after = self._after(norm)
        return after if isinstance(after, Fold) or not before else f"{before}; {after}"

    def _before(self, norm: int) -> Fold | str:
        """Return the fold into the layer whose output the norm reads, or why there is none."""
        program, about = self.program, self.norms[norm]
        value = program.enters[norm]
        layer = program.made_by.get(value)
        if layer not in self.layers:
            made = program.maker.get(value)
            source = self.norms[layer].path if layer in self.norms else made
            return f"its input comes from {source or 'outside the model'}, not from a layer"
        found = self.layers[layer]
        if others := [reader for reader in program.readers[value] if reader != norm]:
            return f"{self._name(others[0])} also reads the output of {found.path}"
        if why := self._unfit(layer):
            return why
        if any(axis < -found.outputs for axis in about.features):
            return f"its features are not the features of {found.path}"
        return Fold(norm, (layer,), before=True)

    def _after(self, norm: int) -> Fold | str:
        """Return the fold into all layers that read the norm's output, or why there is none."""
        readers = self.program.readers[self.program.leaves[norm]]
        layers = tuple(dict.fromkeys(i for i in readers if isinstance(i, int) and i in self.layers))
        if others := [reader for reader in readers if reader not in layers]:
            return f"{self._name(others[0])} reads its output"
        if not layers:
            return "nothing reads its output"
        for layer in layers:
            if why := self._unfit(layer):
                return why
            if not set(self.norms[norm].features) <= set(self.layers[layer].inputs):
                return f"its features are not those that {self.layers[layer].path} contracts"
        return Fold(norm, layers, before=False)

    def _unfit(self, layer: int) -> str:
        """Say why nothing can be folded into a layer, or return ""."""
        found = self.layers[layer]
        why = found.unsupported and f"{found.path} takes no norm: {found.unsupported}"
        return why or self._obstacle(layer)

    def _obstacle(self, module: int) -> str:
        """Say why the variables of a module must stay, or return ""."""
        program, path = self.program, self._name(module)
        if (where := program.within.get(module)) is not None:
            return f"{path} runs within a {where}"
        if program.calls[module] != 1:
            return f"{path} runs {program.calls[module]} times"
        own = [value for (owner, _), value in program.variables.items() if owner == module]
        if not set(own) <= set(program.inputs):
            return f"{path} computes with other weights than the model stores"
        users = Counter(program.variables.values())
        if any(users[value] > 1 for value in own):
            return f"{path} shares its weights"
        for value, reader, running in program.reads:
            if value in own and module not in running:
                return f"{reader} outside of {path} also reads its weights"
        return ""

    def _name(self, reader: int | str) -> str:
        if isinstance(reader, str):
            return reader
        return (self.layers.get(reader) or self.norms[reader]).path


class Folding:
    """What folding does to a model.

    Attributes:
      graph: its layers and norms.
      folds: what is folded, by norm, in the order of the calls.
      weights: new weights of the layers.
      reasons: why other norms stay.
      conditions: the condition numbers of the norms that are, or could be, folded.
    """

    def __init__(self, graph: Graph, arrays: list[Any], bound: float | None) -> None:
        """Decide what to fold.

        Args:
          graph: the layers and norms of the traced model.
          arrays: the arrays that it was traced with.
          bound: the largest condition number, or None for the default of each dtype.
        """
        self.graph, self.bound = graph, bound
        self.folds: dict[int, Fold] = {}
        self.weights: dict[int, Weights] = {}
        self.reasons: dict[int, str] = {}
        self.conditions: dict[int, float] = {}
        plans = {norm: graph.fold_of(norm) for norm in graph.norms}
        given = dict(zip(graph.program.inputs, arrays, strict=True))
        values = graph.program.variables.items()
        self._variables = {name: np.asarray(given[v]) for name, v in values if v in given}
        folds = [plan for plan in plans.values() if isinstance(plan, Fold)]
        self._seen = {module for fold in folds for module in (fold.norm, *fold.layers)}
        self._outputs, self._results = self._run(graph.program, arrays)
        for norm, plan in plans.items():
            new = self._folded(plan) if isinstance(plan, Fold) else plan
            if isinstance(new, str):
                self.reasons[norm] = new
            elif isinstance(plan, Fold):
                self.folds[norm] = plan
                self.weights.update(new)

    def _run(self, program: Program, arrays: list[Any]) -> tuple[dict[int, Any], list[Any]]:
        """Return the outputs of the modules that matter, and of the model."""
        wanted = {("module", number): program.leaves[number] for number in self._seen}
        wanted |= {("result", i): v for i, v in enumerate(program.outputs) if isinstance(v, int)}
        found = {name: np.asarray(v) for name, v in evaluate(program, wanted, arrays).items()}
        parts = {kind: {i: v for (k, i), v in found.items() if k == kind} for kind in _KINDS}
        return parts["module"], list(parts["result"].values())

    def report(self, program: Program, arrays: list[Any]) -> Report:
        """Return the report, with differences from the folded model.

        Args:
          program: the folded model, traced.
          arrays: the arrays that it was traced with.
        """
        outputs, results = self._run(program, arrays)
        rows = tuple(self._row(norm, outputs) for norm in self.graph.norms)
        return Report(rows, *difference(self._results, results))

    def _row(self, norm: int, after: Mapping[int, Any]) -> Row:
        about, fold = self.graph.norms[norm], self.folds.get(norm)
        row = Row(about.path, about.kind, "kept", condition=self.conditions.get(norm))
        if fold is None:
            return replace(row, reason=self.reasons[norm])
        # a layer with a norm before and after it shows both in the output of the second
        taken = {other.layers[0]: other.norm for other in self.folds.values() if other.before}
        shown = [taken.get(layer, layer) for layer in fold.layers]
        apart, largest = difference([self._outputs[i] for i in shown], [after[i] for i in shown])
        names = tuple(self.graph.layers[layer].path for layer in fold.layers)
        row = replace(row, outcome="folded", into=names)
        return replace(row, difference=apart, largest=largest)

    def _folded(self, fold: Fold) -> dict[int, Weights] | str:
        """Return the new weights of the layers that take over a norm, or why they cannot."""
        about = self.graph.norms[fold.norm]
        if not about.linear and not self._has_parameters(fold.norm):
            return "it has neither scale nor bias"
        gain, shift = affine(about, fold.norm, self._variables)
        found = {}
        for layer in fold.layers:
            own = self.weights.get(layer) or self._weights(layer)
            new = into(self.graph.layers[layer], own, about, gain, shift, fold.before)
            if isinstance(new, str):
                return new
            if not new.finite:
                return f"the weights of {self.graph.layers[layer].path} would not be finite"
            found[layer] = new
        conditions = {
            layer: condition(self._outputs[fold.norm if fold.before else layer], new.bias)
            if shift.any()
            else 1.0
            for layer, new in found.items()
        }
        self.conditions[fold.norm] = max(conditions.values())
        for layer, number in conditions.items():
            bound = default_bound(self._outputs[layer].dtype) if self.bound is None else self.bound
            if not number <= bound:
                shown = f"condition number {number:.3g}, more than the bound {bound:.3g}"
                return f"its shift cancels in {self.graph.layers[layer].path}: {shown}"
        return found

    def _weights(self, layer: int) -> Weights:
        bias = self._variables.get((layer, "bias"))
        kernel = double(self._variables[layer, "kernel"])
        return Weights(kernel, None if bias is None else double(bias))

    def _has_parameters(self, norm: int) -> bool:
        return any((norm, name) in self._variables for name in ("scale", "bias"))
