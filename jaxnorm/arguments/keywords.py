"""Hints for arguments that other libraries name otherwise, or that were misspelled."""

from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Names that PyTorch, Keras, Haiku and TensorFlow give to the arguments of norms, and their names
# here. The first name that is accepted counts.
MEANT: Mapping[str, tuple[str, ...]] = {
    "eps": ("epsilon",),
    "variance_epsilon": ("epsilon",),
    "weight": ("scale", "use_scale"),
    "gamma": ("scale", "use_scale"),
    "gain": ("scale",),
    "beta": ("bias", "use_bias"),
    "shift": ("bias",),
    "offset": ("bias",),
    "mask": ("where",),
    "weights": ("where", "mask"),
    "where": ("mask",),
    "axis": ("axes", "feature_axes"),
    "dim": ("axes", "feature_axes", "axis"),
    "normalized_shape": ("axes", "num_features", "reduction_axes"),
    "affine": ("use_scale",),
    "elementwise_affine": ("use_scale",),
    "bias": ("use_bias",),
    "hidden_size": ("hidden_features", "features"),
    "input_size": ("in_features",),
    "track_running_stats": ("use_running_average",),
    "groups": ("num_groups",),
    "lengths": ("seq_lengths",),
    "seq_lengths": ("lengths",),
    "segments": ("segment_ids",),
    "initial_state": ("initial", "initial_carry"),
}


def did_you_mean(names: Collection[str], accepted: Collection[str]) -> str:
    """Return a hint that continues an error about unknown names, or an empty string.

    >>> did_you_mean(["eps"], ["epsilon", "scale"])
    ' Did you mean epsilon?'
    """
    found = []
    for name in sorted(names):
        known = [other for other in MEANT.get(name, ()) if other in accepted]
        found += (known or get_close_matches(name, accepted, 1))[:1]
    return f" Did you mean {' and '.join(dict.fromkeys(found))}?" if found else ""


def with_hint(accepted: Collection[str], function: Callable[..., Result], *given: Any) -> Result:
    """Return ``function(*given)``, and add a hint to its TypeError.

    The last of ``given`` are sizes of a pattern. They may be misspelled options, which the hint
    names.
    """
    try:
        return function(*given)
    except TypeError as error:
        raise TypeError(f"{error}{did_you_mean(given[-1], accepted)}") from None


def refuse_unknown(called: str, names: Collection[str], accepted: Collection[str]) -> NoReturn:
    """Raise a TypeError about the names that are not among the accepted ones."""
    unknown = sorted(set(names) - set(accepted))
    hint = did_you_mean(unknown, accepted)
    raise TypeError(
        f"{', '.join(unknown)} must be an argument of {called}, which takes "
        f"{', '.join(accepted)}.{hint}"
    )


def known_keywords(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function, or the call of a module, answer unknown keywords with a hint.

    For example, ``where`` is called ``mask`` in modules.
    """
    return _checked(call, accepted_by(call))


def accepted_by(function: Callable) -> list[str]:
    """Return the names of the arguments of a function.

    They include the names in the TypedDict of its ``**options``.
    """
    names: list[str] = []
    for name, parameter in signature(function).parameters.items():
        of_options = parameter.kind is Parameter.VAR_KEYWORD
        names += get_args(parameter.annotation)[0].__annotations__ if of_options else [name]
    return [name for name in names if name != "self"]


def _checked(call: Callable[Arguments, Result], accepted: list[str]) -> Callable[Arguments, Result]:
    known = frozenset(accepted)

    @wraps(call)
    def checked(*given: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not options.keys() <= known:
            module = type(given[0]).__name__ if given else ""
            called = {"__call__": f"a call of {module}", "__init__": module}.get(
                call.__name__, call.__name__
            )
            refuse_unknown(called, options, accepted)
        return call(*given, **options)

    return checked


def known_fields(module: type) -> None:
    """Make the constructor of a module answer unknown keywords with a hint.

    A constructor that hands on any keyword stays as it is.
    """
    make = module.__init__  # type: ignore[misc]
    parameters = signature(make).parameters
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        module.__init__ = _checked(make, [name for name in parameters if name != "self"])  # type: ignore[misc]


def by_keyword(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a norm name its keywords when it gets unknown or further positional arguments."""
    parameters = signature(function).parameters
    kinds = {name: parameter.kind for name, parameter in parameters.items() if name != "options"}
    named = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
    positional = [name for name in kinds if name not in named]
    called, named_right = function.__name__, _checked(function, accepted_by(function)[1:])  # not x
    example = (
        f"{called}({', '.join(positional)}, {next(name for name in named if 'axes' in name)}=...)"
    )

    @wraps(function)
    def call(*given: Arguments.args, **options: Arguments.kwargs) -> Result:
        if len(given) > len(positional):
            raise TypeError(
                f"{called} takes {', '.join(positional)} by position: got {len(given)} such "
                "arguments. "
                f"Give {', '.join(named)} by keyword: {example}."
            )
        return named_right(*given, **options)

    return call
