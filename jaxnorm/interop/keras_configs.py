"""Read the configuration of a Keras model: which layers it has, and what their arrays are."""

import json
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Options of norms that decide what they return.
OF_NORMS = ("epsilon", "momentum", "renorm_momentum", "groups")
CELLS = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell"}
ATTENTION = {
    "query_dense": "query",
    "key_dense": "key",
    "value_dense": "value",
    "output_dense": "attention_output",
}
# The arrays of each class in the order of the file; after "?" the option that it takes.
VARIABLES = {
    r"(Dense|EinsumDense|(Depthwise)?Conv\dD|Conv\dDTranspose)": "kernel bias?use_bias",
    r"SeparableConv\dD": "depthwise_kernel pointwise_kernel bias?use_bias",
    "Embedding": "embeddings",
    "BatchNormalization": "gamma?scale beta?center moving_mean moving_variance "
    "moving_stddev?renorm renorm_mean?renorm renorm_stddev?renorm",
    "(Layer|Group)Normalization": "gamma?scale beta?center",
    "RMSNormalization": "scale",
    "PReLU": "alpha",
    "(LSTM|GRU|SimpleRNN)Cell": "kernel recurrent_kernel bias?use_bias",
}
DEFAULTS = {"use_bias": True, "scale": True, "center": True, "renorm": False}
# The class of an EinsumDense whose kernel is not that of a Dense, with features of x first.
OUT_OF_ORDER = "EinsumDense of another order"


@dataclass(frozen=True)
class Place:
    """A layer with arrays of its own.

    Attributes:
      group: its group in the file.
      path: its path in the model, by the names of layers.
      kind: its class.
      options: its configuration.
    """

    group: str
    path: str
    kind: str
    options: Mapping[str, Any]

    def layer(self) -> str:
        """Return its path, which for the only cell of a layer is that of the layer."""
        is_cell = self.kind.endswith("Cell") and self.group.endswith("/cell")
        return self.path.rpartition("/")[0] if is_cell else self.path

    def said(self) -> dict[str, Any]:
        """Return its class, and the options that arrays do not tell."""
        found: dict[str, Any] = {"class": self.kind}
        if self.kind.endswith("Normalization"):
            found |= {name: self.options[name] for name in OF_NORMS if name in self.options}
            if not self.options.get("renorm"):
                found.pop("renorm_momentum", None)
        if self.options.get("reset_after") is False:
            found["reset_after"] = False
        if self.options.get("rms_scaling"):  # divides by the deviation, around the mean
            found["rms_scaling"] = True
        if self.kind == "EinsumDense" and not _in_order(self.options.get("equation")):
            found |= {"class": OUT_OF_ORDER, "equation": self.options["equation"]}
        return found

    def variables(self) -> list[str] | None:
        """Return the names of its arrays in the order of the file, or None for unknown classes."""
        for pattern, names in VARIABLES.items():
            if re.fullmatch(pattern, self.kind):
                options = {**DEFAULTS, **self.options}
                if self.options.get("rms_scaling"):
                    options |= {"scale": True, "center": False}
                if "bias_axes" in self.options or "equation" in self.options:
                    options["use_bias"] = bool(self.options.get("bias_axes"))
                return [
                    name
                    for name, _, needs in (entry.partition("?") for entry in names.split())
                    if not needs or options[needs]
                ]
        return None


def places(layers: Any) -> list[Place]:
    """Return the layers of a configuration.

    Args:
      layers: the configuration of a model as a dict, as JSON, or in a ``.json`` or ``.keras``
        file; a list of the classes of all layers with arrays, in their order; or a dict of
        classes by groups of the file. A class is a name, or a pair of name and options.

    Raises:
      TypeError: layers that are none of these.
      ValueError: files that are no configuration.
    """
    if layers is None:
        return []
    if isinstance(layers, list) and all(isinstance(layer, Place) for layer in layers):
        return layers
    if isinstance(layers, str | os.PathLike):
        layers = _parsed(layers)
    if isinstance(layers, Mapping) and isinstance(layers.get("config"), Mapping):
        return list(_inside(layers, "", ""))
    if isinstance(layers, Mapping) and isinstance(layers.get("layers"), list):
        return list(_inside({"class_name": "Functional", "config": layers}, "", ""))
    if isinstance(layers, Mapping):
        entries = {group: _entry(*_class(value)) for group, value in layers.items()}
        return [place for group in entries for place in _inside(entries[group], group, group)]
    if isinstance(layers, Sequence) and all(map(_is_class, layers)):
        config = {"layers": [_entry(*_class(layer)) for layer in layers]}
        return list(_inside({"class_name": "Functional", "config": config}, "", ""))
    raise TypeError(
        "layers must be a Keras configuration, a list of classes, or a dict of classes by groups: "
        f"got {type(layers).__name__}. Give model.get_config() or the path of config.json."
    )


def are_classes(layers: Any) -> bool:
    """Return whether layers are classes alone, which must all be in the file."""
    if isinstance(layers, Mapping):
        return not {"config", "layers"} & layers.keys()
    return (
        isinstance(layers, Sequence) and all(map(_is_class, layers)) and not isinstance(layers, str)
    )


def _parsed(source: str | os.PathLike) -> Any:
    """Return the configuration in JSON, or in a file of it."""
    text = os.fspath(source)
    if not text.lstrip().startswith("{") and not Path(text).is_file():
        raise FileNotFoundError(
            f"layers must be a configuration or the path of one: there is no file {text[:60]!r}."
        )
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        if text.endswith(".keras"):
            with zipfile.ZipFile(text) as archive:
                return json.loads(archive.read("config.json"))
        return json.loads(Path(text).read_text())
    except (ValueError, KeyError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"layers must be a configuration in JSON: got {text[:60]!r}, {error}. Give config.json "
            "of the .keras archive."
        ) from None


def _is_class(value: Any) -> bool:
    if isinstance(value, str):
        return True
    if isinstance(value, Mapping):
        return "class_name" in value
    is_pair = isinstance(value, Sequence) and len(value) == 2 and isinstance(value[0], str)
    return is_pair and isinstance(value[1], Mapping)


def _class(value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the class and the options of an entry of a list."""
    if not _is_class(value):
        raise TypeError(
            "layers must name classes, such as 'Dense' or ('Dense', {'use_bias': False}): got "
            f"{value!r}."
        )
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping):
        return value["class_name"], value.get("config", {})
    return value[0], value[1]


def _entry(kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"class_name": kind, "config": dict(options)}


def _class_name(layer: Mapping[str, Any]) -> str:
    """Return the class of a layer without the package in which it is registered."""
    return str(layer.get("class_name", "")).rpartition(">")[2]


def _inside(layer: Mapping[str, Any], group: str, path: str) -> Iterator[Place]:
    """Yield the layers of a configuration that have arrays of their own."""
    kind = _class_name(layer)
    config = layer.get("config")
    config = config if isinstance(config, Mapping) else {}
    below = lambda name: f"{group}/{name}" if group else name
    if isinstance(config.get("layers"), list):
        for name, child in _counted(config["layers"]):
            yield from _inside(child, below(f"layers/{name}"), _path(path, child))
    elif isinstance(config.get("cells"), list):
        for name, child in _counted(config["cells"]):
            yield from _inside(child, below(f"cells/{name}"), _path(path, child))
    elif isinstance(config.get("cell"), Mapping):
        yield from _inside(config["cell"], below("cell"), _path(path, config["cell"]))
    elif kind == "Bidirectional":
        yield from _bidirectional(config, below, path)
    elif isinstance(config.get("layer"), Mapping):
        yield from _inside(config["layer"], below("layer"), _path(path, config["layer"]))
    elif kind in CELLS:
        yield Place(below("cell"), f"{path}/{snake(CELLS[kind])}", CELLS[kind], config)
    elif kind == "MultiHeadAttention":
        for name, part in ATTENTION.items():
            yield Place(below(name), f"{path}/{part}", "EinsumDense", config)
    else:
        yield Place(group, path, kind, config)


def _bidirectional(config: Mapping[str, Any], below: Any, path: str) -> Iterator[Place]:
    forward = config["layer"]
    yield from _inside(forward, below("forward_layer"), _path(path, forward))
    backward = config.get("backward_layer") or {
        **forward,
        "config": {**forward["config"], "name": _opposite(forward["config"].get("name", ""))},
    }
    yield from _inside(backward, below("backward_layer"), _path(path, backward))


def _opposite(name: str) -> str:
    return f"backward_{name.removeprefix('forward_')}"


def _path(path: str, layer: Mapping[str, Any]) -> str:
    """Return the path of a layer in another; one without a name has that of its class."""
    config = layer.get("config")
    name = config.get("name") if isinstance(config, Mapping) else None
    own = name or snake(_class_name(layer))
    return f"{path}/{own}" if path else own


def _counted(layers: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield layers with the names of their groups, which count the layers of each class."""
    seen: dict[str, int] = {}
    for layer in layers:
        if not isinstance(layer, Mapping):
            continue
        name = snake(_class_name(layer))
        number = seen.get(name, 0)
        seen[name] = number + 1
        yield (f"{name}_{number}" if number else name), layer


def snake(name: str) -> str:
    """Return the name of a class as groups have it.

    >>> snake("Conv2DTranspose"), snake("RMSNormalization"), snake("PReLU")
    ('conv2d_transpose', 'rms_normalization', 'p_re_lu')
    """
    return re.sub(r"(?<=.)(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _in_order(equation: str | None) -> bool:
    """Return whether a kernel has what it contracts first, as in ``x``, and then features of ``y``.

    >>> _in_order("abc,cde->abde"), _in_order("abc,dc->abd"), _in_order("...x,xy->...y")
    (True, False, True)
    """
    if equation is None:
        return True
    x, kernel, y = re.split(",|->", equation.replace(" ", ""))
    contracted = [axis for axis in x if axis in kernel and axis not in y]
    features = [axis for axis in y if axis in kernel]
    return [*kernel] == contracted + features
