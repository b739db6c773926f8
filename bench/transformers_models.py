"""Compare models of transformers with models in Flax that have their weights.

    python -m bench.transformers_models

writes bench/results/transformers.json and transformers.md. The models are those of examples/models,
with random weights. In bfloat16 every norm gets the input of the norm that it stands for, so that
what differs is its own; logits are compared with those of transformers, and both with float32 on
the same weights.
"""

import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxnorm as jn
from bench.stamp import commit
from bench.transformers_cases import CASES, Case, theirs
from jaxnorm.experiments.report import machine
from jaxnorm.interop.files import as_numpy

RESULTS = Path(__file__).parent / "results"


class Loaded(NamedTuple):
    """A model in Flax with weights: what it computes, and where its norms are."""

    model: Any
    variables: Any
    matching: jn.interop.Matching


def logits_of(model: Any, inputs: np.ndarray) -> np.ndarray:
    """Return the logits of a model of transformers in float32."""
    import torch

    given = torch.tensor(np.moveaxis(inputs, -1, 1) if inputs.ndim == 4 else inputs)
    with torch.no_grad():
        return model(given.to(model.dtype) if inputs.ndim == 4 else given).logits.float().numpy()


def ours(case: Case, hf: Any, inputs: np.ndarray) -> Loaded:
    """Return our model with the weights of one of transformers, in their dtype."""
    dtype = str(hf.dtype).removeprefix("torch.")
    model, variables, (like, names) = case.load(hf, jnp.asarray(inputs, dtype), dtype)
    matching = jn.interop.match(like, hf.state_dict(), framework="torch", names=names)
    return Loaded(model, variables, matching)


def computed(loaded: Loaded, inputs: Any) -> np.ndarray:
    """Return the logits of our model in float32."""
    if loaded.variables is None:
        found = nnx.jit(lambda model, given: model(given))(loaded.model, jnp.asarray(inputs))
    else:
        dtype = jax.tree.leaves(loaded.variables)[0].dtype
        found = jax.jit(loaded.model.apply)(loaded.variables, jnp.asarray(inputs, dtype))
    return np.asarray(found, np.float32)


def largest(found: np.ndarray, true: np.ndarray) -> float:
    """Return the largest difference, as a part of the largest logit."""
    return float(np.abs(found - true).max() / np.abs(true).max())


def recorded(model: Any, inputs: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return input and output of each norm of a model of transformers, channels last."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def last(tensor: Any) -> np.ndarray:
        array = as_numpy(tensor)
        return np.moveaxis(array, 1, -1) if inputs.ndim == array.ndim == 4 else array

    for name, module in model.named_modules():
        if re.search("Norm", type(module).__name__):
            module.register_forward_hook(
                # a copy: residuals are added in place
                lambda _, given, y, name=name: found.update(
                    {name: (last(given[0]), last(y.clone()))}
                )
            )
    logits_of(model, inputs)
    return found


def normalized(loaded: Loaded, given: Mapping[tuple, np.ndarray], inputs: Any) -> dict:
    """Return what our norms make of the given inputs, by their paths."""
    if loaded.variables is None:
        found = {}
        for path, x in given.items():
            module = loaded.model
            for name in path:
                module = module[int(name)] if name.isdigit() else getattr(module, name)
            found[path] = module(jnp.asarray(x))
        return found
    found = {}

    def intercept(call: Any, arguments: tuple, options: dict, context: Any) -> Any:
        path = tuple("/".join(context.module.path).split("/"))
        if path not in given:
            return call(*arguments, **options)
        found[path] = call(jnp.asarray(given[path]), **options)
        return found[path]

    with nn.intercept_methods(intercept):
        loaded.model.apply(loaded.variables, jnp.asarray(inputs, next(iter(given.values())).dtype))
    return found


def norm_bits(loaded: Loaded, hf: Any, inputs: np.ndarray) -> tuple[int, int, int]:
    """Return how many norms, elements of their outputs, and elements with other bits there are.

    Raises:
      AssertionError: outputs that differ by more than their last bit, or 1e-6 of the largest.
    """
    both = recorded(hf, inputs)
    pairs = {
        pair.ours.path: ".".join(pair.theirs.path)
        for pair in loaded.matching.pairs
        if pair.fit.ours.kind == "norm"
    }
    given = {path: both[name][0] for path, name in pairs.items()}
    made = normalized(loaded, given, inputs)
    different = elements = 0
    for path, name in pairs.items():
        mine, true = np.asarray(made[path]), both[name][1]
        assert mine.shape == true.shape, (path, mine.shape, true.shape)
        assert mine.dtype == true.dtype, (path, mine.dtype, true.dtype)
        mine, true = mine.astype(np.float32), true.astype(np.float32)
        # a bias may cancel all but the last bits of float32
        most = 2**-7 * np.abs(true) + 1e-6 * np.abs(true).max()
        assert (np.abs(mine - true) <= most).all(), path
        different += int((mine != true).sum())
        elements += true.size
    return len(pairs), elements, different


def measure(name: str) -> dict[str, Any]:
    """Return all that is compared of one model."""
    case = CASES[name]
    inputs = case.inputs()
    full, half = theirs(case), theirs(case, "bfloat16")
    loaded = ours(case, full, inputs)
    row = {
        "model": name,
        "layers": len(loaded.matching.pairs),
        "found": sorted({re.sub(r" of \d+", "", pair.by) for pair in loaded.matching.pairs}),
        "lines": case.lines(),
        "float32": largest(computed(loaded, inputs), logits_of(full, inputs)),
    }
    loaded = ours(case, half, inputs)
    row["norms"], row["elements"], row["different"] = norm_bits(loaded, half, inputs)
    mine, true = computed(loaded, inputs), logits_of(half, inputs)
    rounded = np.asarray(jnp.asarray(inputs, jnp.bfloat16), np.float32) if case.image else inputs
    exact = logits_of(half.float(), rounded)
    return row | {
        "bfloat16": largest(mine, true),
        "ours to float32": largest(mine, exact),
        "theirs to float32": largest(true, exact),
    }


def page(rows: list[dict[str, Any]], facts: Mapping[str, str]) -> str:
    """Return the results as a page."""
    head = (
        "model | layers, found by | lines | float32 logits | elements of norms in bfloat16, with "
        "other bits | bfloat16 logits | ours to float32 | theirs to float32"
    )
    lines = [f"| {head} |", "|---" * 8 + "|"]
    for row in rows:
        cells = [
            row["model"],
            f"{row['layers']}, {', '.join(row['found'])}",
            str(row["lines"]),
            f"{row['float32']:.1e}",
            f"{row['elements']:,} in {row['norms']} norms, {row['different']}",
            *(f"{row[name]:.1e}" for name in ("bfloat16", "ours to float32", "theirs to float32")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    return f"""# Models of transformers in Flax, with their weights

`python -m bench.transformers_models`: transformers {facts["transformers"]}, torch {facts["torch"]},
jax {facts["jax"]}, flax {facts["flax"]}, {facts["processor"]}, commit {facts["commit"]}.

The weights are random, the sizes small, but for those of ResNet-18. *Lines* are a user's to load
the weights. Differences are parts of the largest logit. The last three columns are of bfloat16,
whose numbers are 3.9e-3 to 7.8e-3 of their size apart. Each norm is given the input of
transformers' norm. Logits in bfloat16 differ by the order of sums in matrix products, and by what
XLA keeps in float32 from one operation to the next.

{table}
"""


def main() -> None:
    rows = []
    for name in CASES:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    packages = {name: version(name) for name in ("torch", "transformers")}
    facts = machine() | packages | {"commit": commit()}
    found = {"machine": facts, "rows": rows}
    (RESULTS / "transformers.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "transformers.md").write_text(page(rows, facts))


if __name__ == "__main__":
    main()
