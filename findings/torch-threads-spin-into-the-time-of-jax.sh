#!/usr/bin/env bash
# One would guess: two libraries timed in turn in one process, each call awaited, do not meet: what the process then spends is the second's.
# What happens: the threads that PyTorch's OpenMP keeps poll for about 10 ms after each operation, before they sleep. A process that sleeps
#   after a layer norm of PyTorch's uses CPU all the while; a norm of JAX's that follows at once shares the cores with them. On two cores it
#   takes a third longer, and the CPU time of the process grows by two thirds, which a benchmark books as JAX's. A pause after PyTorch's
#   call, or OMP_WAIT_POLICY=passive, which must be set before PyTorch is imported, ends it.
# Why it matters: CPU times of norms are a few milliseconds, so that comparisons in turn, as they should be made, are off by more than what
#   they compare; so are programs that load data by PyTorch and train in JAX.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0
"$folder/env/bin/pip" install -q jax==0.10.2 jaxlib==0.10.2
cat > "$folder/program.py" <<'PROGRAM'
import json
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

rows = torch.randn(4096, 1024)
same_rows = jnp.asarray(rows.numpy())


@jax.jit
def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def by_torch():
    torch.nn.functional.layer_norm(rows, (1024,))


def cost(work):
    """Return milliseconds of wall time and of CPU time."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
    return 1e3 * wall, 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def median(first, work):
    found = []
    for _ in range(33):
        first()
        found.append(cost(work))
    return np.median(found[3:], axis=0).round(2).tolist()


def by_jax():
    jax.block_until_ready(normalized(same_rows))


def torch_and_pause():
    by_torch()
    time.sleep(0.05)


print(json.dumps({
    "versions": [torch.__version__, jax.__version__, torch.get_num_threads()],
    "a pause of 20 ms": median(by_torch, lambda: time.sleep(0.02)),
    "JAX at once": median(by_torch, by_jax),
    "JAX after a pause": median(torch_and_pause, by_jax),
}))
PROGRAM
python="$folder/env/bin/python"
export JAX_PLATFORMS=cpu
env -u OMP_WAIT_POLICY "$python" "$folder/program.py" > "$folder/usual.json"
OMP_WAIT_POLICY=passive "$python" "$folder/program.py" > "$folder/passive.json"
"$python" - "$folder" <<'PROGRAM'
import json
import sys
from pathlib import Path

usual, passive = (json.loads(Path(sys.argv[1], f"{name}.json").read_text()) for name in ("usual", "passive"))
torch, jax, threads = usual.pop("versions")
print(f"torch {torch}, jax {jax}, {threads} threads of torch; milliseconds: wall time, CPU time")
for name in usual:
    print(f"{name} after a layer norm of PyTorch's: {usual[name]}; OMP_WAIT_POLICY=passive: {passive[name]}")
if threads < 2:
    sys.exit("one thread alone has nobody to wait for: run this on a machine of several cores")
assert usual["a pause of 20 ms"][1] > 3, "its threads sleep at once by now"
assert passive["a pause of 20 ms"][1] < 1, "they poll although they were asked not to"
assert usual["JAX at once"][1] > 1.2 * usual["JAX after a pause"][1], "JAX is no longer charged for them"
PROGRAM
