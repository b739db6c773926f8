"""Print the numbers of norms as a table, and name those that are not healthy."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp

from jaxnorm.arguments.text import in_columns
from jaxnorm.flax_common.health import Health

HEAD: tuple[str, ...] = (
    "norm",
    "mean",
    "deviation",
    "|mean|/dev",
    "collapsed",
    "from running",
    "var ratio",
    "dead",
    "largest channel",
    "gain",
)


@dataclass(frozen=True)
class Limits:
    """The limits beyond which a norm counts as ill.

    Attributes:
      offset: of ``|mean| / deviation``. At 1e3 a variance in one pass has lost all digits but one.
      collapsed: of the share of groups whose variance is below epsilon.
      mean_distance: of the distance of a running mean, in running deviations.
      var_ratio: of batch variance over running variance, or its inverse.
      dead: of the share of channels with variance 0.
      exploding: of the size of a channel over that of the median channel.
      not_finite: of the share of NaN and infinities.
    """

    offset: float = 1e3
    collapsed: float = 0.1
    mean_distance: float = 1.0
    var_ratio: float = 4.0
    dead: float = 0.1
    exploding: float = 1e3
    not_finite: float = 0.0


MESSAGES = {
    "not_finite": "a share of {x} of its input is NaN or infinite",
    "collapsed": "a share of {x} of its groups has a variance below epsilon",
    "exploding": "its largest channel is {x} times the median channel",
    "dead": "a share of {x} of its channels is constant",
    "offset": "|mean| is {x} deviations, which a variance in one pass does not survive",
    "mean_distance": "a running mean is {x} deviations from the mean of the batch",
    "var_ratio": "batch variance over running variance is {x}",
}


def faults(health: Health, limits: Limits) -> Iterator[tuple[str, jax.Array, jax.Array]]:
    """Yield the name of each number, the number, and whether it is beyond its limit."""
    for name in MESSAGES:
        if (value := getattr(health, name)) is None:
            continue
        # a ratio is as far from 1 below it as above it
        size = jnp.maximum(value, 1 / value) if name == "var_ratio" else value
        yield name, value, size > asdict(limits)[name]


def table(rows: Iterable[tuple[str, str, Health]], missing: Iterable[str]) -> str:
    """Return the numbers of norms as a table, and below it what is not healthy.

    Args:
      rows: path, class and numbers of each norm.
      missing: the paths of norms without numbers.
    """
    lines, ill = [HEAD], []
    for path, name, health in rows:
        lines.append(_row(path or name, health))
        ill += [
            f"{path or name}: {MESSAGES[number].format(x=f'{float(value):.2g}')}."
            for number, value, beyond in faults(health, Limits())
            if bool(beyond)
        ]
    shown = in_columns(lines, right=True)
    left = [f"{path}: gave no numbers, see Diagnosis.missing." for path in missing]
    return "\n".join([*shown, *([""] if ill or left else []), *ill, *left])


def _row(name: str, health: Health) -> tuple[str, ...]:
    number = lambda value: "-" if value is None else f"{float(value):.3g}"
    share = lambda value: f"{100 * float(value):.3g} %"
    gain = "-"
    if health.gain_min is not None:
        gain = f"{number(health.gain_min)} to {number(health.gain_max)}"
    return (
        name,
        number(health.mean),
        number(health.deviation),
        number(health.offset),
        share(health.collapsed),
        number(health.mean_distance),
        number(health.var_ratio),
        share(health.dead),
        f"{number(health.exploding)} at {int(health.channel)}",
        gain,
    )
