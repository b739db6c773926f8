"""Read Keras's files: ``.keras`` archives and HDF5 files of weights.

Groups of a file are named after the classes of layers and number their arrays, such as
``layers/conv2d_1/vars/0``. Only the configuration of the model tells what these are. Files of
Keras 2 (``.h5``) have names.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxnorm.interop.keras_configs import Place, are_classes, places
from jaxnorm.interop.stored import check_file

Options = dict[str, Mapping[str, Any]]


def read(name: str, layers: Any) -> tuple[dict[str, np.ndarray], Options]:
    """Return the arrays of a file by the paths of variables, and the options of the layers.

    Raises:
      FileNotFoundError: no such file.
      IsADirectoryError: a folder.
      ModuleNotFoundError: h5py is not installed.
      ValueError: damaged files, files of other things, and configurations of other models.
    """
    path = Path(name)
    if path.suffix not in (".keras", ".h5", ".hdf5"):
        raise ValueError(
            f"a file of Keras must end with .keras, .weights.h5 or .h5: got {path.name}. Rename "
            "it, or pass its arrays as a dict."
        )
    check_file(path)
    data: Any = path
    if path.suffix == ".keras":
        data, config = _unpacked(path)
        layers = _joined(config, layers)
    if find_spec("h5py") is None:
        raise ModuleNotFoundError(
            f"{path} needs h5py, which is not installed: pip install 'jaxnorm[interop]'.",
            name="h5py",
        )
    import h5py

    try:
        with h5py.File(data, "r") as file:
            root = file.get("model_weights", file)
            if "layer_names" in root.attrs:
                return _named(file, root, layers)
            arrays, names = _arrays(file)
    except (OSError, RuntimeError, KeyError) as error:
        raise ValueError(
            f"{path} must be an HDF5 file of weights: {error}. Download or save it again."
        ) from None
    return _by_places(path, arrays, names, layers)


def options_of(layers: Any) -> Options:
    """Return the options of the layers of a configuration by their paths."""
    return {place.layer(): place.said() for place in places(layers)}


def _unpacked(path: Path) -> tuple[io.BytesIO, Any]:
    """Return the file of weights and the configuration in a ``.keras`` archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
            return io.BytesIO(archive.read("model.weights.h5")), config
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"{path} must be an archive of model.save with config.json and model.weights.h5: "
            f"{error}. Download or save it again."
        ) from None


def _joined(config: Any, layers: Any) -> Any:
    """Return a configuration to which groups of unknown classes are added."""
    if layers is None:
        return config
    more = places(layers)
    groups = {place.group for place in more}
    return [place for place in places(config) if place.group not in groups] + more


def _arrays(file: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return all arrays of a file, and the names of the layers by their groups."""
    import h5py

    arrays: dict[str, np.ndarray] = {}
    names: dict[str, str] = {}

    def visit(name: str, entry: Any) -> None:
        group, _, last = name.rpartition("/")
        if isinstance(entry, h5py.Group) and last == "vars" and "name" in entry.attrs:
            names[group] = str(entry.attrs["name"])
        # not the state of an optimizer and of random numbers
        if isinstance(entry, h5py.Dataset) and not {"optimizer", "seed_generator"} & {
            *name.split("/")
        }:
            arrays[name] = _array(entry)

    file.visititems(visit)
    return arrays, names


def _array(entry: Any) -> np.ndarray:
    array = np.asarray(entry)
    if str(entry.attrs.get("dtype", "")) == "bfloat16":
        return array.view(ml_dtypes.bfloat16) if array.dtype.itemsize == 2 else array
    return array


def _named(file: Any, root: Any, layers: Any) -> tuple[dict[str, np.ndarray], Options]:
    """Read a file of Keras 2, which says the names of layers and arrays."""
    text = lambda value: value.decode() if isinstance(value, bytes) else str(value)
    found: dict[str, np.ndarray] = {}
    groups = [text(name) for name in root.attrs["layer_names"]]
    if "top_level_model_weights" in root:
        groups += ["top_level_model_weights"]
    for group in groups:
        for name in root[group].attrs.get("weight_names", ()):
            found[text(name).removesuffix(":0")] = _array(root[group][text(name)])
    if layers is None and "model_config" in file.attrs:
        layers = json.loads(text(file.attrs["model_config"]))
    return found, options_of(layers)


def _by_places(
    path: Path, arrays: dict[str, np.ndarray], names: Mapping[str, str], layers: Any
) -> tuple[dict[str, np.ndarray], Options]:
    """Name the arrays of a file by its configuration."""
    groups: dict[str, list[str]] = {}
    for key in arrays:
        group, _, number = key.rpartition("/")
        if (group == "vars" or group.endswith("/vars")) and number.isdigit():
            groups.setdefault(group.removesuffix("vars").rstrip("/"), []).append(key)
    if not groups:
        shown = ", ".join(list(arrays)[:3]) or "nothing"
        raise ValueError(
            f"{path} must be weights of Keras, which are in groups called vars: got {shown}. Pass "
            "the arrays as a dict."
        )
    if layers is None:
        raise ValueError(
            f"{path} numbers its arrays and needs the configuration of the model to name them: got "
            "none. Pass layers=, the path of config.json, model.get_config(), or a list such as "
            "['Conv2D', ('Dense', {'use_bias': False})]."
        )
    known = places(layers)
    _check_all_there(path, known, groups, strict=are_classes(layers))
    found: dict[str, np.ndarray] = {}
    options: Options = {}
    for place in known:
        if place.group not in groups:  # what a model uses in two places is stored once
            continue
        if "name" not in place.options:
            place = replace(place, path=_path_of(place.group, names))
        keys = sorted(groups.pop(place.group), key=lambda key: int(key.rpartition("/")[2]))
        found |= _of_place(path, place, {key: arrays[key] for key in keys})
        options[place.layer()] = place.said()
    # layers of unknown classes keep the names of their groups
    found |= {key: arrays[key] for keys in groups.values() for key in keys}
    return found, options


def _check_all_there(
    path: Path, known: Sequence[Place], groups: Mapping[str, Any], *, strict: bool
) -> None:
    """Raise if the file has none of the layers, or if ``strict`` not all of them."""
    lost = [place for place in known if place.variables() and place.group not in groups]
    there = any(place.group in groups for place in known)
    if there and not (strict and lost):
        return
    wrong = f"{lost[0].kind} at {lost[0].group!r}" if lost else "no layer with arrays"
    raise ValueError(
        f"layers must be those of {path}: got {wrong}; the file has "
        f"{', '.join(sorted(groups)[:6])}. Pass the configuration of this model, or classes by "
        "these groups."
    )


def _path_of(group: str, names: Mapping[str, str]) -> str:
    """Return the path of a group by the names that the file has for it."""
    parts = group.split("/")
    groups = ["/".join(parts[: i + 1]) for i in range(len(parts)) if parts[i] != "layers"]
    return "/".join(names.get(group) or group.rpartition("/")[2] for group in groups)


def _of_place(path: Path, place: Place, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays of one layer by their names."""
    names = place.variables()
    if names is None:
        return dict(arrays)
    if len(names) != len(arrays):
        raise ValueError(
            f"{place.kind} {place.path!r} must have {len(names)} arrays by its options, "
            f"{', '.join(names)}: got {len(arrays)} at {place.group!r} of {path}. Pass the "
            "configuration of this model."
        )
    return {
        f"{place.path}/{name}": array for name, array in zip(names, arrays.values(), strict=True)
    }
