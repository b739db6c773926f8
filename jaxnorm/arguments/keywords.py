"""Accept second names of arguments, and answer unknown names with hints.

Unknown names are those of other libraries, and misspelled ones.
"""

import re
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Second names of arguments. Functions say where, as NumPy does, and modules mask, as
# Flax does. segments here are called segment_ids in jax.ops.
ALIASES: Mapping[str, str] = {"mask": "where", "where": "mask", "segment_ids": "segments"}

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
    "weights": ("where", "mask"),
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
    "initial_state": ("initial", "initial_carry"),
    "nonlinearity": ("activation",),
    "activation_fn": ("activation",),
}


def by_name(
    options: Mapping[str, Any], accepted: Collection[str], by_position: Collection[str] = ()
) -> dict[str, Any]:
    """Return keyword arguments with aliases replaced by the names that are accepted.

    An argument None counts as not given.

    Args:
      options: the keyword arguments of a call.
      accepted: the names that the function takes.
      by_position: the names among them that the call has given by position.

    Raises:
      TypeError: an argument came by both its names.

    >>> by_name({"mask": 1, "where": None, "g": 2}, ["where"])
    {'where': 1, 'g': 2}
    """
    named = dict(options)
    for alias, name in ALIASES.items():
        if name not in accepted or alias in accepted or alias not in named:
            continue
        if (value := named.pop(alias)) is None:
            continue
        if named.get(name) is not None or name in by_position:
            raise TypeError(
                f"`{name}` and `{alias}` are two names of one argument: got both. Pass {name} "
                "alone."
            )
        named[name] = value
    return named


def out_of_sizes(sizes: dict[str, Any], axes: Any, **named: Any) -> dict[str, Any]:
    """Return ``named`` with the arguments that came by an alias among the sizes of a pattern.

    They are removed from ``sizes``. A name that the pattern uses is a size, and stays.

    >>> sizes = {"g": 2, "mask": 1}
    >>> out_of_sizes(sizes, "n (g [c])", where=None), sizes
    ({'where': 1}, {'g': 2})
    """
    # decorators would cost each call 0.3 to 0.5 microseconds, so functions that take
    # sizes of a pattern call this one instead, and only if they got any
    if ALIASES.keys().isdisjoint(sizes):
        return named
    of_pattern = re.findall(r"\w+", axes) if isinstance(axes, str) else []
    aliases = [name for name in sizes if ALIASES.get(name) in named and name not in of_pattern]
    return by_name(named | {name: sizes.pop(name) for name in aliases}, named)


def did_you_mean(names: Collection[str], accepted: Collection[str]) -> str:
    """Return a hint that continues an error about unknown names, or an empty string.

    >>> did_you_mean(["eps"], ["epsilon", "scale"])
    ' Did you mean epsilon?'
    """
    found = []
    for name in sorted(names):
        # the table comes first, since by its spelling a name may resemble another argument
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
    """Make a function, or the call of a module, take aliases, and answer unknown keywords.

    The answer has a hint. For example, ``where`` is an alias of ``mask`` in modules. A method gets
    arrays for its arguments of the type ``jax.Array``, also where it is called with a list; the
    error about anything else names the argument.
    """
    return _with_arrays(_checked(call, accepted_by(call)))


def _with_arrays(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    # Imported here because statistics on the host use this file where there is no JAX.
    import jax

    from jaxnorm.arguments.validation import as_array

    parameters = list(signature(call).parameters.values())
    arrays = [(i, p.name) for i, p in enumerate(parameters) if p.annotation is jax.Array]
    if parameters[0].name != "self" or not arrays:
        return call
    call_by_name: Callable[..., Result] = call

    @wraps(call)
    def converted(*given: Arguments.args, **options: Arguments.kwargs) -> Result:
        values: list[Any] = list(given)
        for i, name in arrays:
            if i < len(values) and not isinstance(values[i], jax.Array):
                values[i] = as_array(values[i], name)
            elif name in options and not isinstance(options[name], jax.Array):
                options[name] = as_array(options[name], name)
        return call_by_name(*values, **options)

    return converted


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
    known, names = frozenset(accepted), list(signature(call).parameters)
    call_by_name: Callable[..., Result] = call

    @wraps(call)
    def checked(*given: Arguments.args, **options: Arguments.kwargs) -> Result:
        # a call with right names costs this comparison alone
        if options.keys() <= known:
            return call(*given, **options)
        named = by_name(options, known, names[: len(given)])
        if not named.keys() <= known:
            module = type(given[0]).__name__ if given else ""
            called = {"__call__": f"a call of {module}", "__init__": module}.get(
                call.__name__, call.__name__
            )
            refuse_unknown(called, named, accepted)
        return call_by_name(*given, **named)

    return checked


def known_fields(module: type) -> None:
    """Make the constructor of a module answer unknown keywords with a hint.

    A constructor that hands on any keyword stays as it is.
    """
    make = module.__init__  # type: ignore[misc]
    parameters = signature(make).parameters
    if not any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        module.__init__ = _checked(make, [name for name in parameters if name != "self"])  # type: ignore[misc]


def with_keywords_of(function: Callable, other: Callable, *, without: str = "") -> Signature:
    """Return the signature of a function that passes ``**options`` on to another function.

    It has the parameters of the other function, but one, and the function's own keywords. A
    parameter that both have stands where the other function has it, as the function has it.
    """
    own = dict(signature(function).parameters)
    parameters = signature(other).parameters.items()
    passed = [own.pop(name, p) for name, p in parameters if name != without]
    return Signature([*passed, *(p for p in own.values() if p.kind is p.KEYWORD_ONLY)])


def by_keyword(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a norm take aliases, and name its keywords when it gets others or too many arguments."""
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
