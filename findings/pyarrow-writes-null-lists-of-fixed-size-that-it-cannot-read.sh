#!/usr/bin/env bash
# One would guess: what pyarrow writes to Parquet without an error, it reads.
# What happens: a column of lists of fixed size in which one row is null is written, its metadata and null count are right, and reading
#   it is an ArrowInvalid about a list of size 0. The same rows as lists of any size are read, null and all.
# Why it matters: actions and states of robots are stored as lists of fixed size, and a missing one is null. Who computes the mean and
#   deviation of such a file can neither mask the row nor skip it; the writer has to store lists of any size.
# pyarrow 26.0.1 reads it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q pyarrow==25.0.1
FOLDER="$folder" "$folder/env/bin/python" - <<'PROGRAM'
import os

import pyarrow as pa
import pyarrow.parquet as parquet

rows = [[1.0, 2.0], [3.0, 4.0], None, [5.0, 6.0]]
print("pyarrow", pa.__version__)
found = {}
for name, kind in (("fixed size", pa.list_(pa.float64(), 2)), ("any size", pa.list_(pa.float64()))):
    path = f"{os.environ['FOLDER']}/{name}.parquet"
    parquet.write_table(pa.table({"state": pa.array(rows, kind)}), path)
    try:
        found[name] = parquet.read_table(path).column("state").to_pylist()
    except pa.ArrowInvalid as error:
        found[name] = f"ArrowInvalid: {error}"
    print(f"{name}: written, then read: {found[name]}")
raise SystemExit(not (str(found["fixed size"]).startswith("ArrowInvalid") and found["any size"] == rows))
PROGRAM
