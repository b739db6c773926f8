"""One run: a network trained with one jitted step, and evaluated after every epoch."""

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

Losses = Callable[[Any, Any], jax.Array]  # of outputs and labels: one per example

POINTS = 20  # of the learning curve, per epoch
TABLES = {"embedding"}  # variables that are neither learned nor statistics, but given with the data
AHEAD = 8  # steps that may wait for the device: few, so that progress and interrupts are prompt
PREDICTED = 1000  # test examples at a time
OPTIMIZERS = {"adam": optax.adam, "sgd": optax.sgd}


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def own(losses: jax.Array, labels: jax.Array) -> jax.Array:
    """Of networks whose outputs are losses already."""
    return losses


@dataclass(frozen=True)
class Run:
    """What is trained: everything that the numbers depend on, beside the data."""

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
    """Trains and evaluates; the same run on the same machine gives the same numbers.

    Returns:
      A dict for JSON: ``curve`` (step, loss), ``epochs`` (a list of train_loss, test_loss, for
      classifiers test_accuracy and, for norms with running statistics, the same with batch
      statistics), ``steps_per_second``, and what ``finish`` says of the trained network.
    """
    inputs, labels = jnp.asarray(data.train_inputs), jnp.asarray(data.train_labels)
    step, start = _compiled(
        model, losses, run.optimizer, run.learning_rate, run.batch_size, inputs.shape, inputs.dtype
    )
    state = _given(start(jax.random.key(run.seed)), data)
    steps_per_epoch = len(inputs) // run.batch_size
    total = steps_per_epoch * run.epochs
    curve: dict[str, list] = {"step": [], "loss": []}
    epochs, seconds, done = [], 0.0, 0
    for order in _orders(run, len(inputs), steps_per_epoch):
        started, queue = time.perf_counter(), []
        for indices in order:
            state, loss = step(state, inputs, labels, indices)
            queue.append(loss)
            queue[-AHEAD:][0].block_until_ready()
            on_progress(done + len(queue), total)
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


def _given(state, data: Dataset):
    """The first state, with the data's tables for the variables of their names.

    Raises:
      DataError: there is no table for such a variable.
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
    """Trains a classifier; yields step, parameters and statistics at the start and after every so
    many steps.
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
    state, done = _given(start(jax.random.key(run.seed)), data), 0
    for order in _orders(run, len(inputs), len(inputs) // run.batch_size):
        for indices in order:
            if done % every == 0:
                yield done, *state[:2]
            state, _ = step(state, inputs, labels, indices)
            done += 1
    yield done, *state[:2]


def _orders(run: Run, examples: int, steps: int) -> Iterator[list[np.ndarray]]:
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
    """The step, compiled ahead so that no compilation is timed, and the function that makes its
    first state.
    """
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
        """Made leaf by leaf, nothing computed from inputs: programs of one leaf are compiled once
        for all networks.
        """
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
    return jax.jit(step, donate_argnums=0).lower(state, inputs, labels, indices).compile(), start


def evaluate(
    run: Run, model: nn.Module, state, data: Dataset, losses: Losses = cross_entropy
) -> dict[str, float]:
    """Loss and, of classifiers, accuracy on the test set, with running and, where a norm has them,
    with batch statistics.

    Batch statistics are those of test batches as large as the training batches.
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
    """Outputs, a batch at a time; the last batch is filled up from the start."""
    size = min(batch_size, len(inputs)) if evaluating else batch_size
    wrapped = np.arange(-(-len(inputs) // size) * size) % len(inputs)
    batches = inputs[wrapped].reshape(-1, size, *inputs.shape[1:])
    return np.concatenate([_outputs(model, variables, batch, evaluating) for batch in batches])[
        : len(inputs)
    ]


@partial(jax.jit, static_argnums=(0, 3))
def _outputs(model: nn.Module, variables, inputs, evaluating: bool) -> jax.Array:
    rngs = {"noise": jax.random.key(0)}
    return model.apply(
        variables, inputs, evaluating=evaluating, mutable=["batch_stats"], rngs=rngs
    )[0]


def _summary(
    name: str, outputs: np.ndarray, labels: np.ndarray, losses: Losses
) -> dict[str, float]:
    result = {f"{name}_loss": float(losses(outputs, labels).mean())}
    if outputs.ndim > 1:
        result[f"{name}_accuracy"] = float((outputs.argmax(-1) == labels).mean())
    return result
