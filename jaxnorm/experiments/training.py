"""Train a network with one jitted step, and evaluate it after every epoch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxnorm.experiments.data import DataError, Dataset
from jaxnorm.experiments.models import RUNNING

# a function of outputs and labels that returns one loss per example
Losses = Callable[[Any, Any], jax.Array]

# points of the learning curve, per epoch
POINTS = 20
# variables that are neither learned nor statistics: they come with the data
TABLES = {"embedding"}
# steps that may wait for the device: few, so that progress and interrupts are prompt
AHEAD = 8
# test examples at a time
PREDICTED = 1000
OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross entropy of each example."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def outputs_are_losses(losses: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the outputs, of networks whose outputs are losses already."""
    return losses


@dataclass(frozen=True)
class Run:
    """The settings of one training, on which the numbers depend besides the data."""

    norm: str
    batch_size: int
    seed: int
    variant: str = "dense"
    epochs: int = 5
    learning_rate: float = 1e-3
    momentum: float = 0.99
    optimizer: str = "adam"


def train(
    run: Run,
    model: nn.Module,
    data: Dataset,
    on_progress: Callable[[int, int], None] = lambda step, steps: None,
    losses: Losses = cross_entropy,
    finish: Callable[[nn.Module, Any], dict] = lambda model, variables: {},
) -> dict:
    """Train and evaluate a network.

    A run repeated on the same machine gives the same numbers.

    Returns:
      A dict for JSON: ``curve`` (step, loss), ``epochs``, ``steps_per_second``, and
      what ``finish`` returns for the trained network. Each of ``epochs`` has
      ``train_loss``, ``test_loss`` and, for classifiers, ``test_accuracy``; for norms
      with running statistics also ``batch_test_loss`` and ``batch_test_accuracy``,
      which are with batch statistics.
    """
    inputs, labels = jnp.asarray(data.train_inputs), jnp.asarray(data.train_labels)
    step, start = _compiled(
        model, losses, run.optimizer, run.learning_rate, run.batch_size, inputs.shape, inputs.dtype
    )
    state = _with_tables(start(jax.random.key(run.seed)), data)
    # a last, smaller batch would be another program, and is left out
    steps_per_epoch = len(inputs) // run.batch_size
    total = steps_per_epoch * run.epochs
    curve: dict[str, list] = {"step": [], "loss": []}
    epochs, seconds, done = [], 0.0, 0
    for order in _orders(run, len(inputs), steps_per_epoch):
        started, queue = time.perf_counter(), []
        for indices in order:
            state, loss = step(state, inputs, labels, indices)
            queue.append(loss)
            # the oldest of the steps that may wait: dispatch is asynchronous, and
            # without this all steps of an epoch would queue up
            queue[-AHEAD:][0].block_until_ready()
            on_progress(done + len(queue), total)
        # losses are read once per epoch, since each transfer would wait for its step
        found = np.asarray(jnp.stack(queue), np.float64)
        seconds += time.perf_counter() - started
        for part in np.array_split(np.arange(len(found)), min(POINTS, len(found))):
            curve["step"].append(int(done + part[-1] + 1))
            curve["loss"].append(float(found[part].mean()))
        done += len(found)
        epochs.append(
            {"train_loss": float(found.mean()), **evaluate(run, model, state[:2], data, losses)}
        )
    last = finish(model, {"params": state[0], "batch_stats": state[1]})
    return {"curve": curve, "epochs": epochs, "steps_per_second": total / seconds, **last}


def _with_tables(state, data: Dataset):
    """Return the initial state, with the data's tables in place of the variables of their names.

    Raises:
      DataError: the data have no table for such a variable.
    """
    params, stats, *rest = state
    for name in TABLES & set(stats) - set(data.tables):
        raise DataError(
            f"{name} must be given with the data {data.name}: put its file into the same folder."
        )
    return (
        params,
        stats | {name: jnp.array(table) for name, table in data.tables.items() if name in stats},
        *rest,
    )


def watched(
    run: Run, model: nn.Module, data: Dataset, every: int
) -> Iterator[tuple[int, dict, dict]]:
    """Train a classifier, and yield step, parameters and statistics on the way.

    They come at the start, after every ``every`` steps, and at the end.
    """
    inputs, labels = jnp.asarray(data.train_inputs), jnp.asarray(data.train_labels)
    step, start = _compiled(
        model,
        cross_entropy,
        run.optimizer,
        run.learning_rate,
        run.batch_size,
        inputs.shape,
        inputs.dtype,
    )
    state, done = _with_tables(start(jax.random.key(run.seed)), data), 0
    for order in _orders(run, len(inputs), len(inputs) // run.batch_size):
        for indices in order:
            if done % every == 0:
                yield done, *state[:2]
            state, _ = step(state, inputs, labels, indices)
            done += 1
    yield done, *state[:2]


def _orders(run: Run, examples: int, steps: int) -> Iterator[list[np.ndarray]]:
    """Yield the indices of the examples of each step, epoch by epoch."""
    rng = np.random.default_rng(run.seed)
    for _ in range(run.epochs):
        order = rng.permutation(examples)[: steps * run.batch_size].astype(np.int32)
        yield list(order.reshape(steps, run.batch_size))


@lru_cache
def _compiled(
    model: nn.Module,
    losses: Losses,
    optimizer_name: str,
    learning_rate: float,
    batch_size: int,
    shape,
    dtype,
):
    """Return the compiled training step, and the function that makes its initial state."""
    optimizer = OPTIMIZERS[optimizer_name](learning_rate)

    def loss_fn(params, stats, x, y, noise):
        variables = {"params": params, "batch_stats": stats}
        outputs, new = model.apply(
            variables, x, evaluating=False, mutable=["batch_stats"], rngs={"noise": noise}
        )
        return losses(outputs, y).mean(), new.get("batch_stats", {})

    def step(state, inputs, labels, indices):
        params, stats, optimizer_state, key = state
        key, noise = jax.random.split(key)
        batch = inputs[indices], labels[indices]
        (loss, stats), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
            params, stats, *batch, noise
        )
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), stats, optimizer_state, key), loss

    def start(key):
        """Return parameters, statistics, optimizer state and random key."""
        # lazy_init draws parameters without a pass through the network. Its programs of
        # one leaf are shared by the networks of a comparison: 53 s for the variants and
        # norms of all tasks, 128 s as one program for each network.
        variables = model.lazy_init(
            key, jax.ShapeDtypeStruct((2, *shape[1:]), dtype), evaluating=True
        )
        return (
            variables["params"],
            variables.get("batch_stats", {}),
            optimizer.init(variables["params"]),
            key,
        )

    inputs, labels = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    state = jax.eval_shape(start, jax.random.key(0))
    indices = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    # compiled ahead of time, so that no speed includes a compilation
    return jax.jit(step, donate_argnums=0).lower(state, inputs, labels, indices).compile(), start


def evaluate(
    run: Run, model: nn.Module, state, data: Dataset, losses: Losses = cross_entropy
) -> dict[str, float]:
    """Return the loss on the test set and, for classifiers, the accuracy.

    Norms that keep running statistics are evaluated with these, and with batch
    statistics too. The latter are taken over test batches as large as the training
    batches.
    """
    params, stats = state
    variables = {"params": params, "batch_stats": stats}
    result = _summary(
        "test",
        _predict(model, variables, data.test_inputs, True, PREDICTED),
        data.test_labels,
        losses,
    )
    if run.norm in RUNNING:
        result |= _summary(
            "batch_test",
            _predict(model, variables, data.test_inputs, False, run.batch_size),
            data.test_labels,
            losses,
        )
    return result


def _predict(
    model: nn.Module, variables, inputs: np.ndarray, evaluating: bool, batch_size: int
) -> np.ndarray:
    """Return the outputs for all inputs, computed batch by batch.

    The last batch is filled up with the first examples.
    """
    # batch statistics depend on the size of a batch, which must not shrink for them
    size = min(batch_size, len(inputs)) if evaluating else batch_size
    wrapped = np.arange(-(-len(inputs) // size) * size) % len(inputs)
    batches = inputs[wrapped].reshape(-1, size, *inputs.shape[1:])
    return np.concatenate([_outputs(model, variables, batch, evaluating) for batch in batches])[
        : len(inputs)
    ]


@partial(jax.jit, static_argnums=(0, 3))
def _outputs(model: nn.Module, variables, inputs, evaluating: bool) -> jax.Array:
    """Return the outputs for one batch."""
    # a fixed key: the evaluation of a network repeats to the bit
    rngs = {"noise": jax.random.key(0)}
    return model.apply(
        variables, inputs, evaluating=evaluating, mutable=["batch_stats"], rngs=rngs
    )[0]


def _summary(
    name: str, outputs: np.ndarray, labels: np.ndarray, losses: Losses
) -> dict[str, float]:
    """Return loss and accuracy of these outputs, under names that begin with ``name``."""
    result = {f"{name}_loss": float(losses(outputs, labels).mean())}
    if outputs.ndim > 1:
        result[f"{name}_accuracy"] = float((outputs.argmax(-1) == labels).mean())
    return result
