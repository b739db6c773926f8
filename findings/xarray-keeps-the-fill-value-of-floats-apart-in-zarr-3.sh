#!/usr/bin/env bash
# One would guess: the fill value that xarray is told to write for a float array is the fill value of the Zarr array, as in format 2, or
#   is at least a number among its attributes.
# What happens: in format 3 the array's own fill value stays NaN, and the one that was asked for is an attribute, a string: base64 of
#   the bytes of a float64, though the array is float32. Elements that are missing are stored as -9, as numbers like any other. Integers
#   keep a number in the attribute.
# Why it matters: who reads the array by zarr, or masks its own fill value alone, counts each missing element as -9: the mean and the
#   deviation of a data set are wrong without a word. xarray itself decodes it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q xarray==2026.9.0 zarr==3.1.6
FOLDER="$folder" "$folder/env/bin/python" -W ignore - <<'PROGRAM'
import base64
import os
import struct

import numpy as np
import xarray as xr
import zarr

data = xr.Dataset({"x": ("n", np.array([1, 2, np.nan, 4]))})
print("xarray", xr.__version__, "zarr", zarr.__version__)
found = {}
for version in (2, 3):
    path = f"{os.environ['FOLDER']}/{version}.zarr"
    data.to_zarr(path, zarr_format=version, encoding={"x": {"dtype": "float32", "_FillValue": np.float32(-9)}})
    array = zarr.open_array(f"{path}/x", mode="r")
    attribute = array.attrs.get("_FillValue")
    found[version] = (float(array.fill_value), attribute, array[:].tolist(), xr.open_zarr(path).x.values.tolist())
    print(f"format {version}: fill value {found[version][0]}, attribute {attribute!r}, stored {found[version][2]}, decoded {found[version][3]}")
own, text, stored, decoded = found[3]
held = struct.unpack("<d", base64.b64decode(text))[0] if isinstance(text, str) else None
print("the attribute holds", held)
as_said = np.isnan(own) and held == -9 and stored == [1, 2, -9, 4] and np.isnan(decoded[2]) and found[2][0] == -9
raise SystemExit(not as_said)
PROGRAM
