#!/usr/bin/env bash
# One would guess: weight_norm(module, dim=-1) keeps a norm for each index of the last axis, as dim=2 does for a weight of rank 3, since
#   dim=-2 and dim=-3 are taken for 1 and 0.
# What happens: in PyTorch 2.13.0 -1 stands for None inside, so dim=-1 is one norm of the whole weight, in both weight_norm of
#   torch.nn.utils and that of torch.nn.utils.parametrizations. It raises nothing, and at first the weight is unchanged either way.
# Why it matters: the layer trains with one gain where one for each index was asked for, and a column that grows shrinks all others. Who
#   carries the weights to a library whose negative axes count from the end finds a gain of another shape.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy torch==2.13.0
cat > "$folder/program.py" <<'PROGRAM'
import warnings

import torch
from torch.nn import utils

warnings.simplefilter("ignore", FutureWarning)  # that the older function is deprecated
print("torch", torch.__version__)


def shapes_and_change(dim):
    """The shapes of the gain in both functions, and how much other columns change when the first of the last axis is doubled."""
    torch.manual_seed(0)
    old, new = (torch.nn.Conv1d(4, 3, 5) for _ in range(2))
    old = utils.weight_norm(old, dim=dim)
    new = utils.parametrizations.weight_norm(new, dim=dim)
    gain, direction = new.parametrizations.weight.original0, new.parametrizations.weight.original1
    with torch.no_grad():
        before = new.weight
        direction[..., 0] *= 2
        change = (new.weight - before)[..., 1:].abs().max() / before.abs().max()
    return tuple(old.weight_g.shape), tuple(gain.shape), float(change)


found = {dim: shapes_and_change(dim) for dim in (0, 1, 2, -3, -2, -1, None)}
for dim, (old, new, change) in found.items():
    print(f"dim={dim}: gains {old} and {new}; other columns change by {change:.0%} when the first of the last axis is doubled")
same = found[-3][:2] == found[0][:2] and found[-2][:2] == found[1][:2]
raise SystemExit(not (same and found[-1] == found[None] and found[-1][:2] == ((), ()) and found[2][0] == (1, 1, 5)))
PROGRAM
"$folder/env/bin/python" "$folder/program.py"
