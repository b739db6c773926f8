#!/usr/bin/env bash
# One would guess: LeRobot saves the deviation of a data set's images.
# What happens: LeRobot 0.4.4 keeps sampled images in uint8 and squares them in uint8, which wraps: of images of noise, whose deviation is
#   0.29, it saves 0 for each channel, without an error. A feature of int16 has 0 too. Its main branch casts to float32 first.
# Why it matters: stats.json of data recorded with this version has such deviations for every camera. Policies that normalize images by
#   them divide by 1e-8; those that take ImageNet's do not show it.
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
images = np.random.default_rng(0).integers(0, 256, (50, 3, 20, 20)).astype(np.uint8)
found = feature_stats(images, axis=(0, 2, 3), keepdims=True)
print("LeRobot", importlib.metadata.version("lerobot"))
print("saves the means", (found["mean"] / 255).ravel(), "and deviations", (found["std"] / 255).ravel())
print("the deviations are", (images / 255).std((0, 2, 3)))
raise SystemExit(bool(found["std"].any()))
PROGRAM
