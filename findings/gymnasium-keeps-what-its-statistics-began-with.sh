#!/usr/bin/env bash
# One would guess: the count of 1e-4 that RunningMeanStd begins with is lost among thousands of observations.
# What happens: it is a count of 1e-4 of mean 0 and variance 1, so it adds 1e-4 · mean² / n to the variance: of 10,000 observations at 1000
#   with deviation 0.01 Gymnasium and Stable-Baselines3 have the deviation 0.1005, ten times too much. A constant feature at 1000 has 0.1.
# Why it matters: a position in millimetres or a temperature in kelvin that hardly moves is normalized to a tenth of what it should be. What
#   was merged can be taken out again: the count says how much it was.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q gymnasium==1.4.0
"$folder/env/bin/python" - <<'PROGRAM'
import gymnasium
import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd

data = 1000 + np.random.default_rng(0).standard_normal((10_000, 2)) * [0.01, 0]
statistics = RunningMeanStd(shape=(2,))
for row in data:
    statistics.update(row[None])
found, true = np.sqrt(statistics.var), data.std(0)
print("gymnasium", gymnasium.__version__)
print(f"after {statistics.count:.4f} observations the deviations are {found}, those of the data {true}")
raise SystemExit(not (found > [5 * true[0], 0.05]).all())
PROGRAM
