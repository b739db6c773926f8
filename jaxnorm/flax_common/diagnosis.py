"""What the norms of a model see: numbers that tell whether each is healthy.

A :class:`Diagnosis` is a pytree. Paths and names are static and numbers are arrays, so that a step
under ``jit`` can return one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxnorm.flax_common.diagnosis_figures import over_depth, over_time
from jaxnorm.flax_common.diagnosis_table import MESSAGES, Limits, faults, table
from jaxnorm.flax_common.health import NUMBERS, Health


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("norms",),
    meta_fields=("paths", "names", "missing"),
)
@dataclass(frozen=True)
class Diagnosis:
    """The health of each norm of a model in one batch, in the order of the calls.

    It is a pytree, which ``jit`` returns, and prints itself as a table.

    Attributes:
      norms: the numbers of each norm, a :class:`Health`.
      paths: the path of each norm; a norm that is called again has ``":1"`` behind it.
      names: the name of the class of each norm.
      missing: the paths of norms that gave no numbers, since a transformation of Flax, such as
        ``nn.scan``, does not carry them out.
    """

    norms: tuple[Health, ...]
    paths: tuple[str, ...]
    names: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Health:
        """Return the numbers of the norm at a path."""
        if path not in self.paths:
            raise KeyError(f"path must be of a norm: got {path!r}. There are {self.paths}.")
        return self.norms[self.paths.index(path)]

    def rows(self) -> Iterator[tuple[str, str, Health]]:
        """Yield path, class and numbers of each norm; of a stack, of each layer."""
        for path, name, health in zip(self.paths, self.names, self.norms, strict=True):
            if not (shape := jnp.shape(health.mean)):
                yield path, name, health
                continue
            for index in range(math.prod(shape)):
                each = jax.tree.map(lambda leaf, i=index: jnp.ravel(leaf)[i], health)
                yield f"{path}[{index}]", name, each

    def metrics(self) -> dict[str, Any]:
        """Return all numbers in a flat dict, ``"path/number"``, for a logger.

        They are floats, and arrays only under a transformation such as ``jit``.
        """
        found = {}
        for path, _, health in self.rows():
            for number in NUMBERS:
                if (value := getattr(health, number)) is not None:
                    traced = isinstance(value, jax.core.Tracer)
                    found[f"{path}/{number}"] = value if traced else float(value)
        return found

    def plot(self, path: Any = None) -> Any:
        """Draw the numbers over the depth of the model, and save the picture if a path is given.

        Returns:
          The figure.

        Raises:
          ImportError: matplotlib is missing.
        """
        return over_depth(list(self.rows()), path)

    def __str__(self) -> str:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self)):
            return f"Diagnosis of {', '.join(self.paths)}, traced: print it outside of jit."
        return table(self.rows(), self.missing)


def assert_healthy(
    diagnosis: Diagnosis,
    /,
    *,
    offset: float = Limits.offset,
    collapsed: float = Limits.collapsed,
    mean_distance: float = Limits.mean_distance,
    var_ratio: float = Limits.var_ratio,
    dead: float = Limits.dead,
    exploding: float = Limits.exploding,
    not_finite: float = Limits.not_finite,
) -> None:
    """Raise an error for the first norm that is not healthy; within ``checkify`` under ``jit``.

    Each argument is the greatest healthy value of a number of the diagnosis; ``math.inf`` allows
    all.

    Args:
      diagnosis: the result of ``diagnose``.
      offset: of ``|mean| / deviation``; 1e3 by default.
      collapsed: of the share of groups whose variance is below epsilon; 0.1 by default.
      mean_distance: of the distance of a running mean, in running deviations; 1 by default.
      var_ratio: of batch variance over running variance, or its inverse; 4 by default.
      dead: of the share of constant channels; 0.1 by default.
      exploding: of the size of the largest channel over that of the median one; 1e3 by default.
      not_finite: of the share of NaN and infinities; 0 by default.

    Raises:
      TypeError: anything but a diagnosis.
      jax.experimental.checkify.JaxRuntimeError: a norm that is not healthy, outside of ``jit``. A
        function that ``jit`` compiles must be made by :func:`jax.experimental.checkify.checkify`,
        and returns the error.
      ValueError: from JAX, "not functionalized", where ``jit`` compiles it without ``checkify``.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.RMSNorm(), jnp.array([[1.0, 2.0], [3.0, 5.0]])
    >>> found = nn.diagnose(norm, norm.init(jax.random.key(0), x), x)
    >>> nn.assert_healthy(found)
    >>> nn.assert_healthy(found, exploding=1.01)
    Traceback (most recent call last):
      ...
    jax._src.checkify.JaxRuntimeError: norm at '' (RMSNorm): its largest channel is ...
    """
    from jax.experimental import checkify

    if not isinstance(diagnosis, Diagnosis):
        got = type(diagnosis).__name__
        raise TypeError(f"diagnosis must be the result of diagnose: got {got}.")
    limits = Limits(offset, collapsed, mean_distance, var_ratio, dead, exploding, not_finite)
    for path, name, health in diagnosis.rows():
        for number, value, ill in faults(health, limits):
            # braces in a path are not for the number
            where = f"norm at {path!r} ({name}): ".replace("{", "{{").replace("}", "}}")
            checkify.check(~ill, where + MESSAGES[number], x=value)


def plot_diagnoses(
    diagnoses: Sequence[Diagnosis], path: Any = None, *, steps: Sequence[float] | None = None
) -> Any:
    """Draw the numbers of several diagnoses of one model over time, a color for each norm.

    Args:
      diagnoses: the diagnoses, such as one of every 100 steps.
      path: where to save the picture; None saves nothing.
      steps: the step of each; 0, 1, 2 and so on by default.

    Returns:
      The figure, of matplotlib.

    Raises:
      ImportError: matplotlib is missing.
      TypeError: one diagnosis, which is no sequence.
      ValueError: no diagnoses, or of several models; other steps than diagnoses.

    >>> import jax, jax.numpy as jnp
    >>> from jaxnorm import linen as nn
    >>> norm, x = nn.RMSNorm(), jnp.array([[1.0, 2.0], [3.0, 5.0]])
    >>> found = nn.diagnose(norm, norm.init(jax.random.key(0), x), x)
    >>> len(nn.plot_diagnoses([found, found]).axes)
    6
    """
    if isinstance(diagnoses, Diagnosis):
        raise TypeError(
            "diagnoses must be a sequence, one diagnosis for each step: got one Diagnosis, which "
            "its method plot draws."
        )
    rows = [diagnosis.metrics() for diagnosis in diagnoses]
    if not rows or any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError(
            "diagnoses must be of one model, and one at least: got "
            f"{len(rows)} of {len({frozenset(row) for row in rows})} models."
        )
    steps = range(len(rows)) if steps is None else steps
    if len(steps) != len(rows):
        raise ValueError(f"steps must be one for each diagnosis: got {len(steps)} for {len(rows)}.")
    return over_time({name: [row[name] for row in rows] for name in rows[0]}, steps, path)
