#!/usr/bin/env bash
# One would guess: group_norm of the same values in another memory format is the same up to a few roundings.
# What happens: on the CPU PyTorch 2.13.0 computes E[x^2] - E[x]^2 in float32 for channels_last inputs, and a stable variance for
#   contiguous ones. At variance 1 and mean 100 the outputs are 0.01 to 0.05 off, and from mean 1000 or 10000 on, by the size of the
#   image, the variance is lost: outputs exceed 1000 where 5 is right. The contiguous ones are right to about 0.001 even there.
# Why it matters: channels_last is the advised format of convolutions, and .to(memory_format=...) is meant to change speed alone.
#   An offset in the features, harmless before, becomes noise. It is no truth either to compare another library's group norm with.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy torch==2.13.0
cat > "$folder/program.py" <<'PROGRAM'
import numpy as np
import torch
from torch.nn.functional import group_norm

print("torch", torch.__version__)
noise = np.random.default_rng(0).standard_normal
worst = {}
for size in (16, 64):
    for mean in (0, 10, 100, 1000, 10000):
        x = torch.tensor(noise((2, 32, size, size)) + mean, dtype=torch.float32)
        truth = group_norm(x.double(), 8)
        contiguous, last = (group_norm(x.contiguous(memory_format=f), 8) for f in (torch.contiguous_format, torch.channels_last))
        errors = [float((y - truth).abs().max()) for y in (contiguous, last)]
        worst[size, mean] = errors
        print(f"{size} x {size}, mean {mean:5}: largest error {errors[0]:.1e} contiguous, {errors[1]:.1e} channels_last", end="")
        print(f", outputs up to {float(truth.abs().max()):.1f} in float64, {float(last.abs().max()):.1f} channels_last")
changed = any(worst[size, 1000][0] > 0.001 or worst[size, 1000][1] < 0.01 or worst[size, 10000][1] < 10 for size in (16, 64))
raise SystemExit(changed)
PROGRAM
"$folder/env/bin/python" "$folder/program.py"
