"""How far a model with Flax's norms and the same model with ours are apart, and what each costs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import StringIO

import jax.numpy as jnp
from rich import box
from rich.console import Console, Group
from rich.table import Table

from jaxnorm.flax_common.plain_json import as_json
from jaxnorm.kernels import PLAIN

WIDTH, BOX = 100, box.SIMPLE_HEAD


@dataclass(frozen=True)
class Difference:
    """How far the two ways are apart in one part of the results.

    The numbers are the largest absolute values of differences, divided by ``largest``.

    Attributes:
      part: ``"outputs"``, ``"state"``, ``"gradients of parameters"`` or ``"gradients of inputs"``.
      path: where the two ways differ most.
      largest: the largest absolute value of the part.
      between: between Flax's norms and ours.
      flax_error: of Flax's norms from float64; None where float64 was not computed.
      our_error: of our norms from float64; None where float64 was not computed.
    """

    part: str
    path: str
    largest: float
    between: float
    flax_error: float | None
    our_error: float | None


@dataclass(frozen=True)
class Cost:
    """What a training step costs: outputs, new state and gradients of the loss.

    Attributes:
      residual_bytes: what reverse mode keeps for the backward pass, besides the arguments.
      compile_seconds: time to trace, lower and compile the step, once.
      step_seconds: first quartile, median and third quartile of the time of a step.
    """

    residual_bytes: int
    compile_seconds: float
    step_seconds: tuple[float, float, float]


@dataclass(frozen=True)
class Norm:
    """What one norm of the model runs as.

    Attributes:
      path: its path, or ``""`` within a transformation of nnx, which hides it.
      name: its class.
      shape: the shape of what it normalizes; None where it was not seen.
      dtype: the dtype of what it normalizes.
      implementation: what ran, by the plan; ``""`` where there is no plan.
      derivative: how reverse mode computes the gradients, by the plan.
      others: why no other implementation ran, by its name, or why there is no plan.
    """

    path: str
    name: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    implementation: str = ""
    derivative: str = ""
    others: Mapping[str, str] | str = ""

    @property
    def why(self) -> str:
        """Why no kernel of this platform ran, or why there is no plan, in one line."""
        if isinstance(self.others, str):
            return self.others
        if self.implementation not in PLAIN:
            return ""
        away = "JAX runs on platform"
        kernels = {name: why for name, why in self.others.items() if name not in PLAIN}
        kept = (f"not {name}: {why}" for name, why in kernels.items() if not why.startswith(away))
        return "; ".join(kept)


@dataclass(frozen=True)
class Comparison:
    """A model with Flax's norms and with ours, side by side. It prints itself as tables.

    Attributes:
      differences: of outputs, state and gradients.
      flax: what a training step costs with Flax's norms.
      ours: what it costs with ours.
      norms: what ran for each norm, and why.
      coarsest: the floating dtype with the fewest digits that the model computes with.
      rounds: how often each step was timed, one after the other.
      versions: of the libraries, and the platform.
      notes: what could not be measured, and why.
    """

    differences: tuple[Difference, ...]
    flax: Cost
    ours: Cost
    norms: tuple[Norm, ...]
    coarsest: str
    rounds: int
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        """Half of the digits of the coarsest dtype: the root of its epsilon."""
        return math.sqrt(float(jnp.finfo(self.coarsest).eps))

    def agrees(self, tolerance: float | None = None) -> bool:
        """Return whether the outputs agree, or ours are at least as near to float64.

        Args:
          tolerance: the largest difference, divided by the largest output; by default
            :attr:`tolerance`.
        """
        limit = self.tolerance if tolerance is None else tolerance
        return all(
            found.between <= limit
            or (found.our_error is not None and found.our_error <= (found.flax_error or 0.0))
            for found in self.differences
            if found.part == "outputs"
        )

    def to_json(self) -> str:
        """Return everything as JSON text. Numbers that are not finite become null."""
        return as_json(asdict(self), indent=1)

    def __rich__(self) -> Group:
        """Return the tables, which rich prints."""
        return Group(self._differences(), self._costs(), self._norms(), *self.notes)

    def __repr__(self) -> str:
        console = Console(file=StringIO(), width=WIDTH)
        console.print(self)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _differences(self) -> Table:
        table = Table("", "flax - ours", "flax - float64", "ours - float64", "most at", box=BOX)
        for found in self.differences:
            errors = (found.between, found.flax_error, found.our_error)
            table.add_row(found.part, *map(_small, errors), found.path)
        table.caption = "largest differences, divided by the largest value"
        return table

    def _costs(self) -> Table:
        table = Table("a training step", "flax", "ours", "ours / flax", box=BOX)
        costs = (self.flax, self.ours)
        kept = [cost.residual_bytes for cost in costs]
        table.add_row("residuals, MB", *(f"{size / 1e6:.3f}" for size in kept), _ratio(*kept))
        compiled = [cost.compile_seconds for cost in costs]
        table.add_row("to compile, s", *(f"{each:.2f}" for each in compiled), _ratio(*compiled))
        shown = [
            "{1:.3f} ({0:.3f} to {2:.3f})".format(*(1e3 * each for each in cost.step_seconds))
            for cost in costs
        ]
        table.add_row("time, ms", *shown, _ratio(*(cost.step_seconds[1] for cost in costs)))
        table.caption = f"time: median and quartiles of {self.rounds} rounds, one after the other"
        return table

    def _norms(self) -> Table:
        table = Table("norm", "class", "input", "runs as", "why", box=BOX)
        for norm in self.norms:
            size = "" if norm.shape is None else f"{norm.dtype}{list(norm.shape)}"
            table.add_row(norm.path, norm.name, size, norm.implementation, norm.why)
        return table


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _ratio(flax: float, ours: float) -> str:
    return f"{ours / flax:.2f}" if flax else ""
