"""Write folders of LeRobot, v2.1 and v3."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

# Rows of the episodes.
LENGTHS = (5, 1, 30, 12)


def feature(dtype, *shape):
    return {"dtype": dtype, "shape": shape, "names": None}


def write(version, columns, features=(), path="set"):
    """Write a data set as LeRobot lays it out, one file for each episode or for all."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = len(next(iter(columns.values())))
    episode = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[:rows]
    step = np.concatenate([np.arange(length) for length in LENGTHS])[:rows]
    indices = {
        "timestamp": (step / 30).astype(np.float32),
        "frame_index": step,
        "episode_index": episode,
        "index": np.arange(rows),
        "task_index": np.zeros(rows, np.int64),
    }
    table = pa.table({**columns, **indices})
    os.makedirs(f"{path}/data/chunk-000")
    os.makedirs(f"{path}/meta/episodes/chunk-000")
    if version == "v2.1":
        for number in np.unique(episode):
            part = table.filter(pa.array(episode == number))
            parquet.write_table(part, f"{path}/data/chunk-000/episode_{number:06d}.parquet")
    else:
        parquet.write_table(table, f"{path}/data/chunk-000/file-000.parquet", row_group_size=7)
        # tables that are no data
        parquet.write_table(pa.table({"episode_index": [0]}), f"{path}/meta/tasks.parquet")
    described = {
        **dict(features),
        **{name: feature(str(x.dtype), 1) for name, x in indices.items()},
    }
    info = {"codebase_version": version, "fps": 30, "features": described}
    info["total_episodes"] = int(episode[-1]) + 1
    Path(path, "meta/info.json").write_text(json.dumps(info))
