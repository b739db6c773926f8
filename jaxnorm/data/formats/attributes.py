"""Statistics of live objects of other libraries, read from their attributes; nothing is unpickled.

- scikit-learn: ``StandardScaler``, by ``mean_``, ``var_``, ``scale_`` and ``n_samples_seen_``.
- Stable-Baselines3 and Gymnasium: ``VecNormalize``, ``NormalizeObservation``, ``NormalizeReward``
  and their ``RunningMeanStd``, by ``obs_rms``, ``return_rms``, ``mean``, ``var`` and ``count``.
- Keras: ``Normalization``, by ``mean`` and ``variance``.
- jaxnorm: ``Moments``, of arrays in JAX or on the host.

A mapping of these names stands for such an object.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.values import assembled, not_finite, numbers, scalar
from jaxnorm.data.formula import OURS, Formula

# What RunningMeanStd of Stable-Baselines3 and Gymnasium begins with: as if it had seen this much of
# an element of mean 0 and variance 1.
PRIOR = 1e-4
PRIOR_NOTE = (
    "The statistics began with a count of 1e-4 of mean 0 and variance 1, which they still hold; "
    "without_prior=True takes it out."
)
EPSILON = 1e-8
KERAS_NOTES: tuple[str, ...] = (
    "Keras divides by keras.config.epsilon() at least, which is 1e-7 unless it was set.",
    "Keras 3 keeps no count.",
)
# What other classes of scikit-learn have, that count samples too, and what to do with them.
OTHERS = {
    "data_min_": "Pass Normalizer.from_statistics(min=data_min_, max=data_max_), of mode 'min_max'",
    "min_": "Pass data_min_ and data_max_ to Normalizer.from_statistics(min=..., max=...)",
    "max_abs_": "Pass Normalizer.from_statistics(min=-max_abs_, max=max_abs_), of mode 'min_max'",
    "components_": "Fit a StandardScaler, or a Normalizer, on what it returns",
}
Get = Callable[[str], Any]


def contents(held: Any, *, without_prior: bool = False) -> Contents:
    """Return the statistics of an object of another library, by its attributes.

    Args:
      held: the object, or a mapping of its attributes.
      without_prior: take out what ``RunningMeanStd`` of Stable-Baselines3 and Gymnasium begins
        with, a count of 1e-4 of mean 0 and variance 1.

    Raises:
      FormatError: it has none of the known attributes, or they do not hold numbers.

    >>> import numpy as np
    >>> from jaxnorm.data.formats import attributes
    >>> seen = {"mean": np.array([2.0]), "var": np.array([4.0]), "count": 100.0001}
    >>> attributes.contents(seen, without_prior=True).leaves[""].count.tolist()
    [100.0]
    """
    get: Get = held.get if isinstance(held, Mapping) else lambda name: getattr(held, name, None)
    called = "the mapping" if isinstance(held, Mapping) else type(held).__name__
    has = lambda *names: all(get(name) is not None for name in names)
    if has("obs_rms") or has("return_rms"):
        read = _wrapper(called, get, without_prior)
    elif type(held).__module__.startswith("jaxnorm.") and has("mean", "var", "count"):
        read = Contents({"": _moments(called, get, without_prior)}, OURS)
    elif has("mean", "var", "count"):
        notes = () if without_prior else (PRIOR_NOTE,)
        read = Contents({"": _running(called, get, without_prior)}, Formula(inside=EPSILON), notes)
    elif without_prior:
        raise FormatError(f"without_prior must be of a RunningMeanStd: got {called}. Leave it out.")
    elif has("n_samples_seen_"):
        read = _scaler(called, get)
    elif has("mean", "variance"):
        read = _keras(called, get)
    else:
        raise FormatError(
            f"{called} must have mean_, var_ and n_samples_seen_ (scikit-learn), mean, var and "
            "count or obs_rms (Stable-Baselines3, Gymnasium), or mean and variance (Keras), as "
            "once it was fitted: it has not. Pass its mean and deviation to from_statistics."
        )
    return read._replace(notes=read.notes + not_finite(read.leaves))


def _moments(called: str, get: Get, without_prior: bool) -> Statistics:
    """Return the statistics of a Moments, which began with nothing."""
    if without_prior:
        raise FormatError(f"without_prior must be of a RunningMeanStd: got {called}. Leave it out.")
    arrays = {name: numbers(called, name, get(name)) for name in ("mean", "var", "count")}
    if (low := get("low")) is not None:
        # what each number loses by rounding; a count has two parts
        for name, array in arrays.items():
            parts = getattr(low, name)
            for part in parts if isinstance(parts, tuple) else (parts,):
                array += numbers(called, name, part)
    return assembled(called, "", arrays)


def _scaler(called: str, get: Get) -> Contents:
    """Return the contents of a StandardScaler, which may leave out the mean or the deviation."""
    for name, remedy in OTHERS.items():
        if get(name) is not None:
            raise FormatError(f"{called} must be a StandardScaler: it has {name}. {remedy}.")
    notes: tuple[str, ...] = ()
    arrays = {
        name: None if get(f"{name}_") is None else numbers(called, f"{name}_", get(f"{name}_"))
        for name in ("mean", "var", "scale")
    }
    if arrays["mean"] is arrays["var"] is None and arrays["scale"] is not None:
        raise FormatError(
            f"{called} must have mean_ or var_: it has scale_ alone, which is no deviation for "
            "MinMaxScaler and MaxAbsScaler. Pass from_statistics(min=data_min_, max=data_max_)."
        )
    mean, var, scale = arrays.values()
    known = next((array for array in arrays.values() if array is not None), None)
    if known is None:
        raise FormatError(f"{called} must have a mean or a deviation: it has neither.")
    formula = Formula(unit=True)
    if get("with_mean") is False or mean is None:
        mean, notes = np.zeros(known.shape), (*notes, "The scaler subtracts no mean: it is 0 here.")
        # whether a variance is rounding depends on the mean, so the scaler's own answer is taken
        var, formula = None if scale is None else scale**2, Formula()
    if scale is None:
        var, notes = np.ones(known.shape), (*notes, "The scaler divides by nothing: 1 stands here.")
        formula = Formula()
    count = numbers(called, "n_samples_seen_", get("n_samples_seen_"))
    leaf = assembled(called, "", {"mean": mean, "var": var, "count": count})
    return Contents({"": leaf}, formula, notes)


def _keras(called: str, get: Get) -> Contents:
    arrays = {
        key: numbers(called, name, get(name))
        for key, name in (("mean", "mean"), ("var", "variance"))
    }
    notes = KERAS_NOTES
    if get("invert"):
        notes = (*notes, "The layer inverts: it does what denormalize does.")
    return Contents({"": assembled(called, "", arrays)}, Formula(least=1e-7), notes)


def _wrapper(called: str, get: Get, without_prior: bool) -> Contents:
    """Return the contents of an environment's wrapper, of observations or of rewards."""
    epsilon, clip = get("epsilon"), get("clip_obs")
    epsilon = EPSILON if epsilon is None else scalar(called, "epsilon", epsilon)
    formula = Formula(inside=epsilon)
    notes: tuple[str, ...] = () if without_prior else (PRIOR_NOTE,)
    running = get("obs_rms")
    if running is None:
        leaf = _running(called, _getter(get("return_rms")), without_prior)
        leaf = replace(leaf, mean=np.zeros(np.asarray(leaf.mean).shape))
        return Contents({"": leaf}, formula, (*notes, "Rewards are not centered: the mean is 0."))
    if get("norm_obs") is False:
        raise FormatError(f"{called} must normalize observations: it has norm_obs=False.")
    if clip is not None:
        formula = formula._replace(clip=scalar(called, "clip_obs", clip))
    # Dict observations have one for each key
    several = isinstance(running, Mapping) and not {"mean", "var", "count"} & set(running)
    by_key = running if several else {"": running}
    leaves = {
        str(key): _running(f"{called}, {key!r}," if key else called, _getter(one), without_prior)
        for key, one in by_key.items()
    }
    return Contents(leaves, formula, notes)


def _getter(held: Any) -> Get:
    return held.get if isinstance(held, Mapping) else lambda name: getattr(held, name, None)


def _running(called: str, get: Get, without_prior: bool) -> Statistics:
    """Return the statistics of a RunningMeanStd."""
    arrays = {name: numbers(called, name, get(name)) for name in ("mean", "var", "count")}
    if arrays["count"].size != 1:
        raise FormatError(f"{called} must have one count: got shape {arrays['count'].shape}.")
    known = assembled(called, "", arrays)
    return _without_prior(called, **arrays) if without_prior else known


@np.errstate(over="ignore", invalid="ignore")
def _without_prior(called: str, mean: np.ndarray, var: np.ndarray, count: np.ndarray) -> Statistics:
    """Return what was merged with the prior, of n elements with mean m and variance v.

    The merge of c elements of mean 0 and variance 1 with these had::

        mean = m n / (n + c)
        var (n + c) = v n + c + m^2 n c / (n + c)
    """
    whole = np.rint(count - PRIOR)
    # of a float64 count up to 2^39 the 1e-4 is known to this
    if not np.all(abs(count - PRIOR - whole) <= 0.5 * PRIOR):
        raise FormatError(
            f"{called} must have a whole count and 1e-4, to take out the 1e-4: got "
            f"{np.ravel(count)[0]!r}. Leave out without_prior."
        )
    total, n = whole + PRIOR, np.maximum(whole, 1)
    m = mean * total / n
    v = (var * total - PRIOR - m**2 * whole * PRIOR / total) / n
    empty = whole == 0
    return Statistics(
        mean=np.where(empty, 0.0, m),
        # rounding of a constant feature may lead below 0
        var=np.where(empty, 0.0, np.maximum(v, 0.0)),
        count=np.full(mean.shape, whole.item()),
    )
