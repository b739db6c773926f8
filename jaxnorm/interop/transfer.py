"""Load weights, save weights, and show what belongs together."""

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, TypeVar, overload

import numpy as np

from jaxnorm.arguments.keywords import known_keywords
from jaxnorm.interop.matching import Allowed, Matching, find
from jaxnorm.interop.naming import Names
from jaxnorm.interop.problems import LIKE
from jaxnorm.interop.saving import named_arrays, of_matching
from jaxnorm.interop.stacks import unstacked
from jaxnorm.interop.stored import Stored
from jaxnorm.interop.trees import Tree, converted, take_apart

Model = TypeVar("Model")
FRAMEWORKS = ("torch", "keras", "haiku", "equinox", "flax", "onnx")


@known_keywords
def load(
    like: Model,
    source: Any,
    *,
    framework: str,
    names: Names = None,
    kinds: Mapping[str, str] | None = None,
    allow_missing: Allowed = False,
    allow_unused: Allowed = False,
    allow_rounding: bool = False,
    layers: Any = None,
    show: bool | None = None,
) -> Model:
    """Return a model with the weights of another framework.

    Layers that have the same path on both sides belong together, whatever the separators. Other
    layers are told by ``names``, or else by the shapes of their arrays and by their order; the
    table of what was found is then printed to standard error. Every array is brought into our
    layout. Nothing is changed unless all of it fits.

    Args:
      like: linen variables, an nnx model or State, or the parameters of one layer. Leaves may be
        ``jax.ShapeDtypeStruct``. The new values have their dtypes.
      source: arrays or tensors by name, such as a state dict, or the path of a file:
        ``.safetensors``, its ``.index.json``, ``.npz``, or ``.pt`` of torch.save. Nothing is
        unpickled.
        Keras's are ``.keras``, ``.weights.h5`` and ``.h5``. From Haiku params, or (params, state),
        and from Equinox modules, or (module, state).
      framework: ``"torch"``, ``"keras"``, ``"haiku"``, ``"equinox"``, ``"flax"``, or ``"onnx"`` for
        the arrays W, R and B of its recurrent operators.
      names: from paths of our layers, modules or leaves to theirs, such as ``{"Dense_0": "fc1"}``;
        None as a value leaves a layer as it is. A ``*`` is a part of a name that both have, as in
        ``{"layers_*/attention": "model.h.*.attn"}``; of two such the later decides. ``{i}`` is
        the number of a layer that ``nn.scan`` stacked along axis 0, as in
        ``{"layers/attention": "model.h.{i}.attn"}``. Or a function from
        the path of a layer to its name in the file, or None where the function does not know.
      kinds: what layers are, by patterns of our paths, where arrays do not tell:
        ``"ConvTranspose"``, ``"ConvTranspose(transpose_kernel=True)"``, ``"Conv"``, ``"Dense"``, or
        ``"Conv1D"`` of transformers.
      allow_missing: leaves that may keep their values: True for all, or patterns of their paths.
      allow_unused: arrays that may stay in the file: True for all, or patterns of their names.
      allow_rounding: whether values may lose digits in the dtype of ``like``.
      layers: what a file does not say: for ``.weights.h5`` of Keras its configuration, as a dict or
        the path of its config.json, or the classes of the layers in their order; for files of
        Equinox the modules as they were saved, or a dict of classes by name.
      show: True prints the table, False does not; by default it is printed if names did not
        decide everything.

    Returns:
      A tree like ``like`` with the values, as JAX arrays; NumPy arrays stay such. An nnx model is
      updated and returned.

    Raises:
      TypeError: a model or source that holds no arrays.
      ValueError: arrays that do not fit, or are left over on either side; files that are no
        weights.

    >>> import numpy as np, jaxnorm as jn
    >>> state = {"weight": np.full(2, 3.0, "float32"), "bias": np.ones(2, "float32")}
    >>> like = {"scale": np.ones(2, "float32"), "bias": np.zeros(2, "float32")}
    >>> found = jn.interop.load(like, state, framework="torch")
    >>> found["scale"].tolist(), found["bias"].tolist()
    ([3.0, 3.0], [1.0, 1.0])
    """
    tree, names = unstacked(take_apart(like), names)
    matching = _match(
        tree,
        source,
        framework,
        names=names,
        kinds=kinds,
        allow_missing=allow_missing,
        allow_unused=allow_unused,
        allow_rounding=allow_rounding,
        layers=layers,
    )
    matching.check()
    for message in matching.warnings:
        warnings.warn(message, stacklevel=3)
    if matching.guessed if show is None else show:
        print(matching, file=sys.stderr)
    return tree.rebuild(
        {key: converted(value, tree.leaves[key]) for key, value in matching.values.items()}
    )


@known_keywords
def match(
    like: Any,
    source: Any,
    *,
    framework: str,
    names: Names = None,
    kinds: Mapping[str, str] | None = None,
    allow_missing: Allowed = False,
    allow_unused: Allowed = False,
    allow_rounding: bool = False,
    layers: Any = None,
) -> Matching:
    """Return what :func:`load` would do with these arguments, which prints itself as a table.

    What does not fit is listed in it, and does not raise.

    >>> import numpy as np, jaxnorm as jn
    >>> like = {"Dense_0": {"kernel": np.ones((3, 2), "float32")}}
    >>> state = {"fc.weight": np.ones((2, 3), "float32")}
    >>> print(jn.interop.match(like, state, framework="torch"))
    model           shape  layer  file       shape  change      found by
    Dense_0/kernel  (3,2)  Dense  fc.weight  (2,3)  transposed  shape
    """
    tree, names = unstacked(take_apart(like), names)
    return _match(
        tree,
        source,
        framework,
        names=names,
        kinds=kinds,
        allow_missing=allow_missing,
        allow_unused=allow_unused,
        allow_rounding=allow_rounding,
        layers=layers,
    )


@overload
def save(
    variables: Any,
    *,
    framework: Literal["haiku", "equinox"],
    names: Names = None,
    like: Any = None,
    kinds: Mapping[str, str] | None = None,
    layers: Any = None,
) -> Any: ...


@overload
def save(
    variables: Any,
    *,
    framework: str,
    names: Names = None,
    like: Any = None,
    kinds: Mapping[str, str] | None = None,
    layers: Any = None,
) -> dict[str, np.ndarray]: ...


@known_keywords
def save(
    variables: Any,
    *,
    framework: str,
    names: Names = None,
    like: Any = None,
    kinds: Mapping[str, str] | None = None,
    layers: Any = None,
) -> Any:
    """Return the weights of a model as another framework names and stores them.

    Args:
      variables: linen variables, an nnx model or State, or the parameters of one layer.
      framework: as in :func:`load`.
      names: as in :func:`load`. Without ``like`` the layers that are not in it keep their paths.
      like: arrays by name, or the path of a file, as the other framework saves the same model: the
        result has its names, shapes and dtypes. None names the arrays after the model's layers.
      kinds: as in :func:`load`.
      layers: as in :func:`load`, of ``like``.

    Returns:
      NumPy arrays by name, in memory of their own. For Haiku dicts of modules, or (params, state);
      for Equinox modules if ``like`` is of them.

    Raises:
      TypeError: variables that hold no arrays.
      ValueError: parameters that the other framework has no place for; with ``like``, what
        :func:`load` raises.

    >>> import numpy as np, jaxnorm as jn
    >>> params = {"Dense_0": {"kernel": np.ones((3, 2), "float32")}}
    >>> found = jn.interop.save(params, framework="torch", names={"Dense_0": "fc"})
    >>> {name: array.shape for name, array in found.items()}
    {'fc.weight': (2, 3)}
    """
    module = _framework(framework)
    tree, names = unstacked(take_apart(variables, "variables"), names)
    arranged = getattr(module, "arranged", lambda arrays, like: arrays)
    if like is None:
        return arranged(named_arrays(tree, module, names, kinds), None)
    try:
        stored = _stored(module, module.template, like, layers)
    except (TypeError, ValueError) as error:
        if not str(error).startswith("source "):
            raise
        raise type(error)(f"like {str(error).removeprefix('source ')}") from None
    matching = find(
        tree, stored, module, names=names, kinds=kinds, allow_rounding=True, source=LIKE
    )
    matching.check()
    return arranged(of_matching(matching, tree, stored.arrays), like)


def _match(tree: Tree, source: Any, framework: str, layers: Any, **options: Any) -> Matching:
    module = _framework(framework)
    stored = _stored(module, module.prepared, source, layers)
    matching = find(tree, stored, module, **options)
    if matching.problems:
        matching.hint = _hint(stored, framework)
    return matching


def _stored(module: ModuleType, read: Callable[..., Any], source: Any, layers: Any) -> Stored:
    """Return what a framework reads from a source."""
    if getattr(module, "READS_LAYERS", False):
        return read(source, layers)
    if layers is not None:
        raise ValueError(
            "layers must be None but for Keras and Equinox, whose files lack names: got "
            f"{type(layers).__name__} for {module.NAME!r}. Use names."
        )
    return Stored(*read(source))


def _hint(stored: Stored, framework: str) -> str:
    """Return which framework's names arrays bear, if it is another one."""
    shapes = {key: tuple(array.shape) for key, array in stored.arrays.items()}

    def knows(name: str) -> bool:
        module = _framework(name)
        return all(
            any(form.kind != "parameter" for form in layer.forms(module.FORMS))
            for layer in module.file_layers(shapes)
        )

    others = [] if knows(framework) else [name for name in FRAMEWORKS if knows(name)]
    return f"These are names as in framework={others[0]!r}." if others else ""


def _framework(name: str) -> ModuleType:
    """Return the module with the table of a framework."""
    if name not in FRAMEWORKS:
        listed = ", ".join(map(repr, FRAMEWORKS))
        raise ValueError(f"framework must be one of {listed}: got {name!r}.")
    return import_module(f"jaxnorm.interop.{name}")
