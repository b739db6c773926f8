"""Trains one small network with batch norm over several processes, to the parameters that one
process reaches with the whole batch.

    # on this machine; compares with one process
    python examples/processes.py --processes 2
    # examples of each process, by step: the rest is padding
    python examples/processes.py --processes 2 --shares 64,64 64,20 64,0
    # saves, and goes on from there when run again
    python examples/processes.py --processes 2 --checkpoint runs/processes
    # on every host of a pod slice, the same command
    python examples/processes.py --pod --checkpoint gs://bucket/folder

``launch`` stands in for a launcher of several machines; ``train`` is what runs on a pod slice as it
is.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxnorm import linen as jnn

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
# seconds in which the others must end by themselves once a process has failed; then they are killed
PATIENCE = 60
BOUND = 1e-6  # how far a parameter may be from that of one process, after every step
HOST = "127.0.0.1"
Shares = list[list[int]]  # for each step, in turn, how many examples each process has


class Net(nn.Module):
    """Digits of 8 x 8 pixels to 10 logits; examples that the mask leaves out count for nothing,
    even where they are NaN.
    """

    @nn.compact
    def __call__(self, images, mask):
        norm = partial(jnn.BatchNorm, use_running_average=False, momentum=0.9, axis_name="data")
        # of the pixels: padding, NaN so far, is 0 from here on
        x = norm()(images, mask=mask[:, None, None, None])
        x = nn.Conv(8, (3, 3), strides=2)(x)
        x = nn.relu(norm()(x, mask=mask[:, None, None, None]))
        x = nn.Dense(32)(x.reshape(len(x), -1))
        return nn.Dense(10)(nn.relu(norm()(x, mask=mask[:, None])))


def init() -> dict:
    """Parameters, running statistics and the optimizer's state: the same in every process, from the
    same key.
    """
    variables = Net().init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), jnp.ones(1, bool))
    return {**variables, "optimizer": OPTIMIZER.init(variables["params"])}


def update(
    state: dict, batch: tuple, *, total: Callable = lambda value: value
) -> tuple[dict, jax.Array]:
    """A step on the whole batch, or within shard_map on a device's part of it, where ``total`` sums
    over devices.
    """
    images, labels, mask = batch

    def loss_of(params):
        variables = {"params": params, "batch_stats": state["batch_stats"]}
        logits, changed = Net().apply(variables, images, mask, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return total((losses * mask).sum()) / total(mask.sum().astype(losses.dtype)), changed[
            "batch_stats"
        ]

    (loss, stats), gradient = jax.value_and_grad(loss_of, has_aux=True)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradient, state["optimizer"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "batch_stats": stats,
        "optimizer": optimizer,
    }, loss


@cache
def digits(file: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """All images and labels, from the file that ``launch`` wrote, or from scikit-learn, which takes
    long to import.
    """
    if file:
        with np.load(file) as arrays:
            return arrays["images"], arrays["labels"]
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels.astype(np.int32)


def part(
    step: int, shares: Shares, process: int | None, data: Path | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels and mask of a process for a step, padded to the largest share; of all
    processes, without padding, for None.
    """
    images, labels = digits(data)
    own = shares[step % len(shares)]
    chosen = np.random.default_rng(step).permutation(len(images))[: sum(own)]
    if process is None:
        return images[chosen], labels[chosen], np.ones(len(chosen), bool)
    chosen = chosen[sum(own[:process]) :][: own[process]]
    size = max(map(max, shares))
    padded = np.full((size, *images.shape[1:]), np.nan, np.float32), np.zeros(size, np.int32)
    padded[0][: len(chosen)], padded[1][: len(chosen)] = images[chosen], labels[chosen]
    return *padded, np.arange(size) < len(chosen)


def train(options: argparse.Namespace) -> None:
    """What every process runs, here as on a pod slice."""
    process, shares = jax.process_index(), options.shares or [[64] * jax.process_count()]
    # the devices of all processes
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    step_of = jax.jit(update, donate_argnums=0, out_shardings=everywhere)
    if options.how == "shard_map":
        own = partial(update, total=partial(jax.lax.psum, axis_name="data"))
        step_of = jax.jit(
            jax.shard_map(own, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()),
            donate_argnums=0,
        )
    saved = Saved(options.checkpoint, options.save_every)
    first, state = saved.restore(jax.jit(init, out_shardings=everywhere)())
    for step in range(first, options.steps):
        batch = tuple(
            jax.make_array_from_process_local_data(rows, array)
            for array in part(step, shares, process, options.data)
        )
        if step == options.stop_at:
            os.kill(os.getpid(), options.stop_by)
        state, loss = step_of(state, batch)
        print(f"process {process}: step {step}, loss {float(loss):.6f}", flush=True)
        if options.record:
            np.savez(options.record / f"{step}-{process}.npz", **named(state))
        saved.save(step, state)
    saved.close()


class Saved:
    """Checkpoints of all processes in one folder: Orbax writes each array once, and none counts
    before every process has written.
    """

    def __init__(self, folder: str | None, every: int):
        self.manager = None
        if folder:
            import orbax.checkpoint as ocp

            options = ocp.CheckpointManagerOptions(
                save_interval_steps=every, max_to_keep=2, enable_async_checkpointing=False
            )
            self.manager = ocp.CheckpointManager(
                folder if "://" in folder else Path(folder).absolute(), options=options
            )
            self.args = ocp.args

    def restore(self, state: dict) -> tuple[int, dict]:
        """The step to go on with, and the state: the one that is given where nothing is saved."""
        if self.manager is None or self.manager.latest_step() is None:
            return 0, state
        latest = self.manager.latest_step()
        like = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding),
            state,
        )
        return latest + 1, self.manager.restore(latest, args=self.args.StandardRestore(like))

    def save(self, step: int, state: dict) -> None:
        if self.manager is not None:
            self.manager.save(step, args=self.args.StandardSave(state))

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()


def named(state: dict) -> dict[str, np.ndarray]:
    """Parameters and running statistics by their paths."""
    leaves = jax.tree.leaves_with_path({name: state[name] for name in ("params", "batch_stats")})
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def alone(shares: Shares, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Parameters and running statistics after each step of one process with the whole batch,
    without padding.
    """
    state, step_of = jax.jit(init)(), jax.jit(update)
    for step in range(steps):
        state, _ = step_of(state, part(step, shares, None, None))
        yield named(state)


def difference(record: Path, shares: Shares, steps: int) -> float:
    """The largest from one process, over all steps that were recorded, processes, parameters and
    running statistics.

    Raises:
      FileNotFoundError: nothing was recorded.
    """
    found = []
    for step, expected in enumerate(alone(shares, steps)):
        for file in record.glob(f"{step}-*.npz"):
            with np.load(file) as got:
                found.append(
                    max(float(np.abs(got[name] - value).max()) for name, value in expected.items())
                )
    if not found:
        raise FileNotFoundError(f"no step is recorded in {record}.")
    return float(np.max(found))  # NaN if any is


class Ended(NamedTuple):
    """How a process ended: its return code, -9 for SIGKILL, after how many seconds, and what it
    printed.
    """

    code: int
    seconds: float
    text: str


def launch(
    processes: int,
    arguments: list[str],
    *,
    timeout: float = 120,
    of_one: dict[int, list[str]] | None = None,
) -> list[Ended]:
    """Runs ``train`` in processes of this machine, each by ``python processes.py`` with the
    arguments and those ``of_one``.

    None is left when this returns: after ``timeout`` seconds, or PATIENCE after one has failed,
    those that still run are killed.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        np.savez(
            data := Path(folder) / "digits.npz", images=digits(None)[0], labels=digits(None)[1]
        )
        free.bind((HOST, 0))
        address = f"{HOST}:{free.getsockname()[1]}"
        free.close()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
        environment.pop("XLA_FLAGS", None)  # which may ask for more devices
        command = [
            sys.executable,
            __file__,
            "--processes",
            str(processes),
            "--coordinator",
            address,
            "--data",
            str(data),
            *arguments,
        ]
        logs, running = [Path(folder) / f"{process}.log" for process in range(processes)], []
        started, seconds = time.monotonic(), [timeout] * processes
        try:
            for process, log in enumerate(logs):
                own = [*command, "--process", str(process), *(of_one or {}).get(process, [])]
                with log.open("wb") as output:
                    running.append(
                        subprocess.Popen(
                            own, stdout=output, stderr=subprocess.STDOUT, env=environment
                        )
                    )
            waiting = set(range(processes))
            while waiting and time.monotonic() - started < timeout:
                time.sleep(0.05)
                for process in [
                    process for process in waiting if running[process].poll() is not None
                ]:
                    seconds[process] = time.monotonic() - started
                    waiting.remove(process)
                    if running[process].returncode:
                        timeout = min(timeout, seconds[process] + PATIENCE)
        finally:
            for child in running:
                child.kill()  # of no effect on one that has ended
                child.wait()
        codes = [child.returncode for child in running]
        return [
            Ended(*facts)
            for facts in zip(
                codes, seconds, [log.read_text(errors="replace") for log in logs], strict=True
            )
        ]


def join(options: argparse.Namespace) -> None:
    """Makes this one of several processes of this machine."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", options.devices)
    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.process,
        cluster_detection_method="deactivate",
        # on loopback alone: by default on all addresses of the machine
        coordinator_bind_address=options.coordinator,
        initialization_timeout=120,
        heartbeat_timeout_seconds=options.heartbeat,
    )


def run_one(options: argparse.Namespace) -> int:
    """Trains as one of the processes, and ends with a clear error if another is lost."""
    try:
        train(options)
    except jax.errors.JaxRuntimeError as error:
        again = (
            f"the last checkpoint in {options.checkpoint}"
            if options.checkpoint
            else "the beginning: --checkpoint was not given"
        )
        print(
            f"process {jax.process_index()}: another process ended or cannot be reached: {error}",
            file=sys.stderr,
        )
        print(
            f"Start all processes again with the same command, to go on from {again}.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)  # Python's own end would wait for the lost one, in jax.distributed.shutdown
    return 0


def run_here(options: argparse.Namespace) -> int:
    """Starts the processes on this machine and compares every step with one process."""
    # so that what launch has started ends too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        ended = launch(
            options.processes, [*sys.argv[1:], "--record", folder], timeout=options.timeout
        )
        print("".join(process.text for process in ended), end="")
        lost = [
            f"process {number} ended with {process.code}"
            for number, process in enumerate(ended)
            if process.code
        ]
        if lost:
            print("; ".join(lost), file=sys.stderr)
            return 1
        if not any(Path(folder).iterdir()):
            print("Nothing to do: all steps were done before.")
            return 0
        largest = difference(
            Path(folder), options.shares or [[64] * options.processes], options.steps
        )
    print(
        f"Largest difference from one process with the whole batch, after any step: {largest:.1e}, "
        f"at most {BOUND:.0e}."
    )
    return 0 if largest <= BOUND else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = made.add_argument
    add("--processes", type=int, default=2, help="how many, on this machine; 2 by default")
    add(
        "--pod",
        action="store_true",
        help="this is one of the processes that a TPU pod, Slurm or MPI has started",
    )
    add("--steps", type=int, default=20, help="20 by default")
    add(
        "--how",
        choices=("jit", "shard_map"),
        default="jit",
        help="one program for all devices, or one for each device's part",
    )
    add(
        "--shares",
        nargs="+",
        type=lambda text: [int(share) for share in text.split(",")],
        help="examples of each process, by step",
    )
    add("--checkpoint", metavar="FOLDER", help="where to save, and to go on from")
    add("--save-every", type=int, default=5, metavar="STEPS", help="5 by default")
    add(
        "--heartbeat",
        type=int,
        default=10,
        metavar="SECONDS",
        help="after how long a silent process is taken for lost; 10 by default",
    )
    add("--devices", type=int, default=1, help="of each process on this machine; 1 by default")
    add(
        "--timeout",
        type=float,
        default=300,
        metavar="SECONDS",
        help="after how long processes on this machine are killed; 300 by default",
    )
    add(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="where each process writes its parameters after every step",
    )
    for name, kind in (
        ("--coordinator", str),
        ("--process", int),
        ("--data", Path),
        ("--stop-at", int),
        ("--stop-by", int),
    ):
        # by launch, and tests
        add(
            name,
            type=kind,
            default=signal.SIGKILL if name == "--stop-by" else None,
            help=argparse.SUPPRESS,
        )
    return made


def main() -> int:
    options = parser().parse_args()
    if options.pod:
        jax.distributed.initialize()
    elif options.process is None:
        return run_here(options)
    else:
        join(options)
    return run_one(options)


if __name__ == "__main__":
    sys.exit(main())
