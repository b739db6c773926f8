#!/usr/bin/env bash
# One would guess: interpolate(mode="nearest") from n to m positions takes floor(i n / m) for each i < m, as its documentation's scale
#   says; and jax.image.resize(method="nearest") takes the same.
# What happens: PyTorch 2.13.0 multiplies i by n / m rounded to float32, and floors that: for 15 of 4096 pairs of sizes up to 64 some
#   position comes from a neighbour, such as 14 -> 46 and 26 -> 22. mode="nearest-exact", which looks from the centres of pixels,
#   is off for 53 pairs. jax.image.resize looks from the centres too, so it differs from mode="nearest" for most pairs.
# Why it matters: SPADE resizes its map of labels so, from the size of the image to the size of each layer. Weights that are carried
#   over from PyTorch meet another label at such a position, and by jax.image.resize at most of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy torch==2.13.0 jax==0.10.2 jaxlib==0.10.2
cat > "$folder/program.py" <<'PROGRAM'
import jax
import numpy as np
import torch
from torch.nn.functional import interpolate

print("torch", torch.__version__, "jax", jax.__version__)
off = {"nearest": [], "nearest-exact": []}
for n in range(1, 65):
    x = torch.arange(n, dtype=torch.float32)[None, None]
    for m in range(1, 65):
        i = np.arange(m)
        truth = {"nearest": i * n // m, "nearest-exact": (2 * i + 1) * n // (2 * m)}
        for mode, positions in truth.items():
            found = interpolate(x, size=m, mode=mode)[0, 0].numpy()
            if (found != positions).any():
                off[mode].append((n, m))
for mode, pairs in off.items():
    print(f"mode={mode!r}: off for {len(pairs)} of 4096 pairs of sizes: {pairs}")
differ = 0
for n in range(1, 9):
    for m in range(1, 9):
        x = np.arange(n, dtype=np.float32)
        theirs = interpolate(torch.tensor(x)[None, None], size=m, mode="nearest")[0, 0].numpy()
        differ += bool((np.asarray(jax.image.resize(x, (m,), "nearest")) != theirs).any())
print(f"jax.image.resize differs from mode='nearest' for {differ} of 64 pairs up to 8")
raise SystemExit((14, 46) not in off["nearest"] or len(off["nearest"]) != 15 or len(off["nearest-exact"]) != 53 or differ < 32)
PROGRAM
JAX_PLATFORMS=cpu "$folder/env/bin/python" "$folder/program.py"
