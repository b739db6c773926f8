#!/usr/bin/env bash
# One would guess: the deviation that LeRobot saves for a joint at 1000 ± 0.1 is 0.1.
# What happens: LeRobot keeps the mean and the mean of squares in the dtype of the data, float32 for states and actions, and takes
#   E[x²] − E[x]². Of 1000 values around 1000 with deviation 0.1 it saves the deviation 0, around 100 15 % too much. openpi has the same
#   class, and saves 0.7 of 100,000 values in 100 batches.
# Why it matters: ticks of an encoder, millimetres and time stamps lie that far from 0. MEAN_STD then divides by 1e-8, and nothing says
#   so. Who reads such a file cannot repair it: the data must be fitted again.
# The program runs LeRobot's own module by itself: the package as a whole needs gigabytes, of which this module needs a reader of images.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q numpy==2.4.6
"$folder/env/bin/pip" install -q --no-deps lerobot==0.4.4
"$folder/env/bin/python" - <<'PROGRAM'
import importlib.metadata
import runpy
import sys
from types import ModuleType

import numpy as np

for name in ("lerobot", "lerobot.datasets", "lerobot.datasets.utils"):
    sys.modules[name] = ModuleType(name)
sys.modules["lerobot.datasets.utils"].load_image_as_numpy = None
path = importlib.metadata.distribution("lerobot").locate_file("lerobot/datasets/compute_stats.py")
feature_stats = runpy.run_path(str(path))["get_feature_stats"]
noise = np.random.default_rng(0).standard_normal((1000, 1))
right = True
for center, true in ((0, True), (100, False), (1000, False)):
    x = (center + 0.1 * noise).astype(np.float32)
    found = feature_stats(x, axis=0, keepdims=False)["std"].item()
    exact = x.astype(np.float64).std()
    print(f"around {center}: LeRobot saves {found:.6f}, the deviation is {exact:.6f}")
    right &= (abs(found - exact) < 0.1 * exact) == true
raise SystemExit(not right)
PROGRAM
