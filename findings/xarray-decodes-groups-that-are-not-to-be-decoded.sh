#!/usr/bin/env bash
# One would guess: decode_cf=False gives the numbers of a file as they are stored, whichever function of xarray opens it.
# What happens: open_dataset and open_datatree do so. open_groups, which takes the same argument, decodes all the same: packed integers
#   come back as floats with scale, offset and missing values applied. The single switches, such as mask_and_scale=False, are obeyed.
# Why it matters: who fits statistics, and unpacks numbers in blocks, applies scale and offset twice to the groups of a file. The numbers
#   stay plausible, and nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/env"
"$folder/env/bin/pip" install -q xarray==2026.9.0 h5netcdf==1.8.2 h5py==3.16.0 numpy==2.4.6
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import sys

import numpy as np
import xarray as xr

packed = {"x": {"dtype": "int16", "scale_factor": 0.5, "_FillValue": -1}}
data = xr.Dataset({"x": ("n", np.array([1.0, np.nan, 3.0]))})
data.to_netcdf("packed.nc", engine="h5netcdf", encoding=packed)

options = {"engine": "h5netcdf", "decode_cf": False}
found = {
    "open_dataset": xr.open_dataset("packed.nc", **options)["x"],
    "open_datatree": xr.open_datatree("packed.nc", **options)["x"],
    "open_groups": xr.open_groups("packed.nc", **options)["/"]["x"],
    "open_groups, mask_and_scale=False": xr.open_groups(
        "packed.nc", engine="h5netcdf", mask_and_scale=False
    )["/"]["x"],
}
print("xarray", xr.__version__)
for name, array in found.items():
    print(f"{name:34} {array.dtype!s:8} {array.values.tolist()}")
kinds = [array.dtype.kind for array in found.values()]
sys.exit(0 if kinds == ["i", "i", "f", "i"] else 1)
PROGRAM
