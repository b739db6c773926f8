"""One run: a network trained with one jitted step, and evaluated after every epoch."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jaxnorm.experiments.data import Dataset
from jaxnorm.experiments.models import RUNNING, LeNet

POINTS = 20  # of the learning curve, per epoch


@dataclass(frozen=True)
class Run:
    """What is trained: everything that the numbers depend on, beside the data."""

    norm: str
    batch_size: int
    seed: int
    where: str = "dense"
    epochs: int = 5
    learning_rate: float = 1e-3
    momentum: float = 0.99

    @property
    def key(self) -> tuple[str, int, int]:
        return self.norm, self.batch_size, self.seed


def train(run: Run, data: Dataset, on_progress: Callable[[int, int], None] = lambda step, steps: None) -> dict:
    """Trains and evaluates; the same run on the same machine gives the same numbers.

    Returns:
      A dict for JSON: ``curve`` (step, loss), ``epochs`` (a list of train_loss, test_loss, test_accuracy and, for norms
      with running statistics, the same with batch statistics), ``steps_per_second``.
    """
    model = LeNet(run.norm, run.where, run.momentum)
    images, labels = jnp.asarray(data.train_images), jnp.asarray(data.train_labels)
    step, start = _compiled(model, run.learning_rate, run.batch_size, images.shape)
    state = start(jax.random.key(run.seed), images)
    steps_per_epoch = len(images) // run.batch_size
    total = steps_per_epoch * run.epochs
    curve: dict[str, list] = {"step": [], "loss": []}
    epochs, seconds, done = [], 0.0, 0
    for order in _orders(run, len(images), steps_per_epoch):
        started, queue = time.perf_counter(), []
        for indices in order:
            state, loss = step(state, images, labels, indices)
            queue.append(loss)
            if len(queue) % 50 == 0:
                loss.block_until_ready()  # keeps the queue short, so that progress and interrupts are prompt
                on_progress(done + len(queue), total)
        losses = np.asarray(jnp.stack(queue), np.float64)
        seconds += time.perf_counter() - started
        for part in np.array_split(np.arange(len(losses)), min(POINTS, len(losses))):
            curve["step"].append(int(done + part[-1] + 1))
            curve["loss"].append(float(losses[part].mean()))
        done += len(losses)
        epochs.append({"train_loss": float(losses.mean()), **evaluate(run, model, state, data)})
        on_progress(done, total)
    return {"curve": curve, "epochs": epochs, "steps_per_second": total / seconds}


def _orders(run: Run, examples: int, steps: int) -> Iterator[list[np.ndarray]]:
    rng = np.random.default_rng(run.seed)
    for _ in range(run.epochs):
        order = rng.permutation(examples)[: steps * run.batch_size].astype(np.int32)
        yield list(order.reshape(steps, run.batch_size))


@lru_cache
def _compiled(model: nn.Module, learning_rate: float, batch_size: int, shape: tuple[int, ...]):
    """The step, compiled ahead so that no compilation is timed, and the function that makes its first state."""
    optimizer = optax.adam(learning_rate)

    def loss_fn(params, stats, x, y):
        logits, new = model.apply({"params": params, "batch_stats": stats}, x, evaluating=False, mutable=["batch_stats"])
        return cross_entropy(logits, y).mean(), new.get("batch_stats", {})

    def step(state, images, labels, indices):
        params, stats, optimizer_state = state
        batch = images[indices], labels[indices]
        (loss, stats), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, stats, *batch)
        updates, optimizer_state = optimizer.update(gradient, optimizer_state, params)
        return (optax.apply_updates(params, updates), stats, optimizer_state), loss

    def start(key, images):
        variables = model.init(key, images[:2], evaluating=True)
        return variables["params"], variables.get("batch_stats", {}), optimizer.init(variables["params"])

    images, labels = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    state = jax.eval_shape(start, jax.random.key(0), images)
    indices = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
    return jax.jit(step, donate_argnums=0).lower(state, images, labels, indices).compile(), jax.jit(start)


def evaluate(run: Run, model: nn.Module, state, data: Dataset) -> dict[str, float]:
    """Loss and accuracy on the test set, with running and, where a norm has them, with batch statistics.

    Batch statistics are those of test batches as large as the training batches.
    """
    params, stats, _ = state
    variables = {"params": params, "batch_stats": stats}
    images, labels = data.test_images, data.test_labels
    result = _summary("test", _predict(model, variables, images, True), labels)
    if run.norm in RUNNING:
        count = -(-len(images) // run.batch_size)
        wrapped = np.arange(count * run.batch_size) % len(images)  # the last batch is filled up from the start
        logits = _predict_batches(model, variables, images[wrapped].reshape(count, run.batch_size, *images.shape[1:]))
        result |= _summary("batch_test", logits.reshape(-1, logits.shape[-1])[: len(images)], labels)
    return result


@partial(jax.jit, static_argnums=(0, 3))
def _predict(model: nn.Module, variables, images, evaluating: bool) -> jax.Array:
    return model.apply(variables, images, evaluating=evaluating, mutable=["batch_stats"])[0]


@partial(jax.jit, static_argnums=0)
def _predict_batches(model: nn.Module, variables, batches) -> jax.Array:
    return jax.vmap(lambda images: _predict(model, variables, images, False))(batches)


def _summary(name: str, logits: jax.Array, labels: np.ndarray) -> dict[str, float]:
    loss = float(cross_entropy(logits, labels).mean())
    return {f"{name}_loss": loss, f"{name}_accuracy": float((np.asarray(logits).argmax(-1) == labels).mean())}


def cross_entropy(logits: jax.Array, labels) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
