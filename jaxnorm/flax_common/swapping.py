"""What a norm passes on to the norm that replaces it."""

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any, ParamSpec, TypeVar

from jaxnorm.flax_common.surgery import Row
from jaxnorm.norms import table
from jaxnorm.norms.rows import Norm

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# of the constructor, where the new norm takes them
ALWAYS = ("dtype", "param_dtype", "use_scale", "use_bias", "axis_name", "axis_index_groups")
RUNNING = ("momentum", "use_running_average", "unbiased", "skip_constant", "axis")
AXES = ("reduction_axes", "feature_axes")


def asking_for_norm(swap: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a function say what is missing if it is called without ``to``, or with inputs."""
    kinds = [parameter.kind for parameter in signature(swap).parameters.values()]
    takes_inputs = Parameter.VAR_POSITIONAL in kinds

    @wraps(swap)
    def asked(*given: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not takes_inputs and len(given) > 1:
            raise TypeError(
                f"swap of nnx takes the model alone by position: got {len(given)} arguments. Give "
                "the new norm by to=, and no inputs, which linen needs."
            )
        if "to" not in options:
            raise TypeError(
                "to must be the name of the new norm: got none. Pass to='rms', for example; "
                "jaxnorm.available_norms() has all names."
            )
        return swap(*given, **options)

    return asked


def target(to: str) -> Norm:
    """Return the row of a norm that can replace another one.

    Raises:
      ValueError: an unknown norm, or one that is not called as ``y = norm(x)``.
    """
    row = table.find(to, "to")
    if row.call != "y = norm(x)":
        raise ValueError(
            f"to must be a norm that is called as y = norm(x): {to!r} is called as {row.call}. "
            "Replace it in the code of the model."
        )
    return row


def carried(path: str, old: Any, row: Norm, new: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a norm that the one in its place takes too.

    Args:
      path: its path.
      old: the norm.
      row: the row of the other norm.
      new: its class, or the function that makes it.

    Raises:
      ValueError: the features of ``old`` are not its last axis, and the new norm takes no others.
    """
    # nnx gives its classes another signature than their constructors have
    makes: Any = type.__getattribute__(new, "__init__") if isinstance(new, type) else new
    takes = signature(makes).parameters
    names = [*ALWAYS, *(["epsilon"] if "+ epsilon" in row.formula else []), *RUNNING]
    # reduction_axes of group norm are others than those of layer norm
    if (
        hasattr(old, "reduction_axes")
        and not hasattr(old, "num_groups")
        and row.axes == "n h w [c]"
    ):
        names += AXES
    found = {name: getattr(old, name) for name in names if name in takes and hasattr(old, name)}
    for name in ("axis", "feature_axes"):
        given = getattr(old, name, -1)
        if name not in found and given not in (-1, (-1,), [-1]):
            raise ValueError(
                f"{path or 'the model'} must have its features on the last axis to be replaced by "
                f"{row.name!r}: got {name}={given}. Leave it out by only=."
            )
    return found


def matched(
    old: Mapping[str, Any], new: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the variables of a new norm, and the names that are kept, dropped and added.

    Variables of the same name and shape keep their values.
    """
    same = [name for name in new if name in old and old[name].shape == new[name].shape]
    values = {name: old[name] if name in same else value for name, value in new.items()}
    dropped = tuple(name for name in old if name not in same)
    return values, tuple(same), dropped, tuple(name for name in new if name not in same)


def swapped_row(
    path: str, old: str, new: str, names: Iterable[tuple[str, ...]], options: Mapping[str, Any]
) -> Row:
    """Return the row of the report for a norm that was replaced."""
    kept, dropped, added = names
    shown = tuple(f"{name}={value}" for name, value in options.items() if name == "epsilon")
    return Row(path, old, "swapped", (new,), (*kept, *shown), dropped, added)
