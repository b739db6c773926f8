"""Check what the constructors of all modules are given."""

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any

from jaxnorm.arguments import validation
from jaxnorm.arguments.axes import integer
from jaxnorm.arguments.dtypes import checked_dtype
from jaxnorm.arguments.keywords import known_fields
from jaxnorm.flax_common.arguments import flag

Check = Callable[[str, Any], Any]
# the least size of each kind; an array may have no features
SIZES: Mapping[str, int] = {
    "num_features": 0,
    "condition_features": 1,
    "hidden_features": 1,
    "num_classes": 1,
    "num_heads": 1,
    "num_kv_heads": 1,
}

BY_NAME: Mapping[str, Check] = {
    "epsilon": validation.number_or_traced,
    "momentum": lambda name, value: validation.momentum(value),
    "param_dtype": checked_dtype,
}


def check_arguments(module: type) -> None:
    """Make the constructor of a module check its arguments.

    It names what is missing or misspelled, and refuses flags that are no booleans, initializers
    that are no functions, sizes that are no positive integers, and likewise numbers and dtypes.
    Messages name the class that is called, also where another one has the constructor.
    """
    known_fields(module)
    make = module.__init__  # type: ignore[misc]
    parameters = dict(list(signature(make).parameters.items())[1:])  # without self
    checks = {
        name: check for name, parameter in parameters.items() if (check := _check_of(parameter))
    }
    positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [name for name, p in parameters.items() if _is_required(p)]

    @wraps(make)
    def checked(self: Any, *given: Any, **options: Any) -> None:
        values = dict(zip(positional, given, strict=False)) | options
        known = options.keys() <= parameters.keys()  # else known_fields names the others
        for name in required if known else ():
            if name not in values:
                raise TypeError(
                    f"{name} must be given to {type(self).__name__}: got no such argument."
                )
        for name in checks.keys() & values.keys():
            checks[name](name, values[name])
        try:
            make(self, *given, **options)
        except AttributeError as error:
            rngs = values.get("rngs")
            if "rngs" not in parameters or hasattr(rngs, "params"):
                raise
            raise TypeError(
                f"rngs must be nnx.Rngs: got {rngs!r}. Pass rngs=nnx.Rngs(0)."
            ) from error

    module.__init__ = checked  # type: ignore[misc]


def _is_required(parameter: Parameter) -> bool:
    kinds = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    return parameter.default is Parameter.empty and parameter.kind in kinds


def _check_of(parameter: Parameter) -> Check | None:
    """Return the check of an argument, by its name or its default."""
    name, default = parameter.name, parameter.default
    if isinstance(default, bool) and name != "use_running_average":  # None leaves it to the call
        return flag
    if name.endswith("_init"):
        return _or_none(_function) if default is None else _function
    if name == "activation" and not isinstance(default, str):
        return _or_none(_activation)
    if name in BY_NAME:
        return BY_NAME[name]
    if name == "dtype":
        return _or_none(checked_dtype)
    if name in SIZES:
        return _or_none(_size) if default is None else _size
    return None


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(
            f"{name} must be a function (key, shape, dtype): got {value!r}. Take one of "
            "jax.nn.initializers."
        )


def _activation(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(
            f"{name} must be a function of an array, or None: got {value!r}. Take one of jax.nn."
        )


def _size(name: str, value: Any) -> None:
    must = f"{name} must be an integer of at least {SIZES[name]}"
    if integer(value, must) < SIZES[name]:
        raise ValueError(f"{must}: got {value}.")
