"""The statistics within a LeRobot policy, which its normalizing processor keeps.

A policy's folder has ``policy_preprocessor.json``, which names each step's file, as in
``policy_preprocessor_step_3_normalizer_processor.safetensors``. That file holds the statistics of
the data set by names such as ``observation.state.mean``, in float32
(``lerobot.processor.normalize_processor`` of https://github.com/huggingface/lerobot). The formula
is that of :mod:`jaxnorm.data.formats.lerobot`, with the policy's own epsilon.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxnorm.data.formats import documents
from jaxnorm.data.formats.contents import Contents, FormatError, Statistics
from jaxnorm.data.formats.lerobot import FORMULA, leaf_of
from jaxnorm.data.formats.values import doubtful, not_finite, scalar

NAME = "lerobot_policy"
CONFIG = "policy_preprocessor.json"
STEPS = ("normalizer_processor", "unnormalizer_processor")
UNDONE = "LeRobot divides by the deviation + {:g}, but undoes that by the deviation alone."


def recognizes(path: Path) -> bool:
    """Return whether a path is a policy's folder, its configuration, or a processor's file."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return path.is_file() and path.stem.endswith(STEPS)
    return documents.matches(_config(path), lambda held: bool(_steps(held)))


def read(path: Path) -> Contents:
    """Read the statistics of a policy, from its folder, configuration or processor's file."""
    path = Path(path)
    if path.suffix == ".safetensors":
        configs = sorted(path.parent.glob("*.json"))
        found = [step for one in configs for step in _steps(_loaded(one))]
        config = next((step for step in found if step.get("state_file") == path.name), {})
    else:
        steps = _steps(documents.load(_config(path)))
        if not steps or not isinstance(steps[0].get("state_file"), str):
            raise FormatError(f"{_config(path)} must name the file of a normalizer: it names none.")
        config, path = steps[0], _config(path).parent / Path(steps[0]["state_file"]).name
    entries: dict[str, dict] = {}
    for name, array in _arrays(path).items():
        leaf, _, key = name.rpartition(".")
        entries.setdefault(leaf, {})[key] = array
    leaves = {leaf: leaf_of(path, leaf, entry) for leaf, entry in entries.items()}
    if not leaves:
        raise FormatError(f"{path} must hold statistics of features: it holds none.")
    own = config.get("config")
    own = own if isinstance(own, Mapping) else {}
    eps = scalar(path, "eps", own.get("eps", FORMULA.added))
    notes = (UNDONE.format(eps), *_modes(own), *not_finite(leaves), *doubtful(leaves))
    return Contents(leaves, FORMULA._replace(added=eps, range_zero=eps), notes)


def write(path: Path, leaves: dict[str, Statistics]) -> None:
    """Refuse to write: a policy is more than its statistics."""
    raise FormatError(
        f"{path} must be written by LeRobot, with the policy: it is not here. Write 'lerobot' "
        "instead, and pass its stats to the policy's normalizer."
    )


def _config(path: Path) -> Path:
    return path / CONFIG if path.is_dir() else path


def _loaded(path: Path) -> Any:
    try:
        return documents.load(path)
    except FormatError:
        return None


def _steps(held: Any) -> list[dict]:
    """Return the normalizing steps of a configuration."""
    steps = held.get("steps") if isinstance(held, dict) else None
    named = [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return [step for step in named if step.get("registry_name") in STEPS]


def _modes(config: Mapping) -> tuple[str, ...]:
    """Return a sentence on the mode by which the policy normalizes each kind of feature."""
    modes, features = config.get("norm_map"), config.get("features")
    if not isinstance(modes, Mapping) or not modes:
        return ()
    said = [f"{kind} by {mode}" for kind, mode in modes.items()]
    kinds: dict[str, list[str]] = {}
    for name, feature in features.items() if isinstance(features, Mapping) else ():
        kind = feature.get("type") if isinstance(feature, Mapping) else None
        kinds.setdefault(str(kind), []).append(str(name))
    named = "; ".join(f"{kind} is {', '.join(names)}" for kind, names in kinds.items())
    return (f"The policy normalizes {', '.join(said)}{f', where {named}' if named else ''}.",)


def _arrays(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.numpy import load
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{path} needs safetensors, which is not installed: pip install 'jaxnorm[data]'.",
            name="safetensors",
        ) from None
    try:
        return load(path.read_bytes())
    except (SafetensorError, KeyError):
        raise FormatError(f"{path} must be a safetensors file: it is none, or cut off.") from None
