"""How each library fits mean, variance and quantiles to a stream of chunks."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

RANKS = (0.01, 0.99)
# Where the source of the robot libraries lies; they are no packages that install by themselves.
OPENPI, LEROBOT = "OPENPI_NORMALIZE", "LEROBOT_COMPUTE_STATS"


class Found(NamedTuple):
    """Mean and variance of each feature, and its quantiles by their rank."""

    mean: np.ndarray
    var: np.ndarray
    quantiles: dict[float, np.ndarray]


Chunks = Iterable[np.ndarray]
Fit = Callable[[Chunks], Found]


def jaxnorm_fit(threads: int, quantiles: bool = False) -> Fit:
    from jaxnorm.data import Normalizer

    def run(chunks: Chunks) -> Found:
        given = RANKS if quantiles else None
        fitted = Normalizer.fit(chunks, threads=threads, quantiles=given)
        found = {rank: value[0] for rank, value in fitted.quantiles.items()}
        return Found(fitted.moments.mean[0], fitted.moments.var[0], found)

    return run


def sklearn_fit() -> Fit:
    from sklearn.preprocessing import StandardScaler

    def run(chunks: Chunks) -> Found:
        scaler = StandardScaler()
        for chunk in chunks:
            scaler.partial_fit(chunk)
            del chunk
        return Found(scaler.mean_, scaler.var_, {})

    return run


def keras_fit() -> Fit:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    def run(chunks: Chunks) -> Found:
        layer = keras.layers.Normalization(axis=-1)
        layer.adapt(iter(chunks))
        return Found(np.asarray(layer.adapt_mean), np.asarray(layer.adapt_variance), {})

    return run


def nnx_fit() -> Fit:
    import jax.numpy as jnp
    from flax import nnx

    def run(chunks: Chunks) -> Found:
        metric = nnx.metrics.Welford()
        for chunk in chunks:
            metric.update(values=jnp.asarray(chunk))
            del chunk
        found = metric.compute()
        mean, deviation = np.asarray(found.mean), np.asarray(found.standard_deviation)
        return Found(mean[None], deviation[None] ** 2, {})

    return run


def brax_fit() -> Fit:
    import jax
    import jax.numpy as jnp
    from brax.training.acme import running_statistics

    update = jax.jit(running_statistics.update)

    def run(chunks: Chunks) -> Found:
        state = None
        for chunk in chunks:
            x = jnp.asarray(chunk)
            state = running_statistics.init_state(x[0]) if state is None else state
            state = update(state, x)
            del chunk, x
        return Found(np.asarray(state.mean), np.asarray(state.std).astype(float) ** 2, {})

    return run


def dask_fit() -> Fit:
    """xarray's mean and variance over Dask's chunks, each of which is read when it is needed."""
    import dask
    import dask.array as da
    import xarray as xr

    def run(chunks: Any) -> Found:
        read = dask.delayed(chunks.read, pure=False)
        parts = [da.from_delayed(read(i), chunks.shape, np.float32) for i in range(len(chunks))]
        whole = xr.DataArray(da.concatenate(parts), dims=("row", "feature"))
        mean, var = dask.compute(whole.mean("row"), whole.var("row"))
        return Found(mean.values, var.values, {})

    return run


def openpi_fit() -> Fit:
    """Physical Intelligence's openpi, src/openpi/shared/normalize.py."""
    running = _module(OPENPI, "openpi_normalize", {}).RunningStats

    def run(chunks: Chunks) -> Found:
        found = _updated(running(), chunks).get_statistics()
        return Found(found.mean, found.std.astype(float) ** 2, {0.01: found.q01, 0.99: found.q99})

    return run


def lerobot_fit() -> Fit:
    """Hugging Face's LeRobot, src/lerobot/datasets/compute_stats.py."""
    running = lerobot().RunningQuantileStats

    def run(chunks: Chunks) -> Found:
        found = _updated(running(), chunks).get_statistics()
        quantiles = {0.01: found["q01"], 0.99: found["q99"]}
        return Found(found["mean"], found["std"].astype(float) ** 2, quantiles)

    return run


def _updated(stats: Any, chunks: Chunks) -> Any:
    for chunk in chunks:
        stats.update(chunk)
        del chunk
    return stats


def lerobot() -> ModuleType:
    # names that the file imports, and its classes of statistics do not use
    unused = {
        "lerobot": (),
        "lerobot.datasets": (),
        "lerobot.configs": ("is_depth_map",),
        "lerobot.processor": ("RelativeActionsProcessorStep",),
        "lerobot.utils": (),
        "lerobot.utils.constants": ("ACTION", "OBS_STATE"),
        "lerobot.datasets.io_utils": ("load_image_as_numpy",),
    }
    return _module(LEROBOT, "lerobot.datasets.compute_stats", unused)


def _module(variable: str, name: str, unused: dict[str, tuple[str, ...]]) -> ModuleType:
    """Load a file of a library by its path, without what it imports and does not use here."""
    path = os.environ.get(variable)
    if not path or not Path(path).is_file():
        raise FileNotFoundError(f"{variable} must name the file of that library: got {path!r}.")
    for module, names in unused.items():
        stub = ModuleType(module)
        stub.__path__ = []
        vars(stub).update(dict.fromkeys(names))
        sys.modules[module] = stub
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def squares(dtype: type) -> Callable[[], Fit]:
    def run(chunks: Chunks) -> Found:
        count, total, squared = 0, np.zeros(1, dtype), np.zeros(1, dtype)
        for chunk in chunks:
            x = chunk.astype(dtype, copy=False)
            count, total, squared = count + len(x), total + x.sum(0), squared + (x * x).sum(0)
            del chunk, x
        return Found(total / count, squared / count - (total / count) ** 2, {})

    return lambda: run


def two_pass(chunks: Any) -> Found:
    """The textbook's, in float64: what accuracy is held against."""
    rows = len(chunks) * chunks.shape[0]
    mean = sum(chunk.sum(0, dtype=np.float64) for chunk in chunks) / rows
    var: Any = sum(((chunk - mean) ** 2).sum(0) for chunk in chunks) / rows
    return Found(mean, var, {})


OURS = "jaxnorm.data.Normalizer"
TRUTH = "two passes, float64"
PEERS: dict[str, Callable[[], Fit]] = {
    OURS: lambda: jaxnorm_fit(os.cpu_count() or 1),
    f"{OURS}, one thread": lambda: jaxnorm_fit(1),
    f"{OURS}, quantiles": lambda: jaxnorm_fit(os.cpu_count() or 1, True),
    f"{OURS}, quantiles, one thread": lambda: jaxnorm_fit(1, True),
    "openpi RunningStats, quantiles": openpi_fit,
    "LeRobot RunningQuantileStats, quantiles": lerobot_fit,
    "scikit-learn StandardScaler.partial_fit": sklearn_fit,
    "xarray and Dask": dask_fit,
    "brax running_statistics (JAX)": brax_fit,
    "Keras Normalization.adapt (JAX)": keras_fit,
    "flax.nnx.metrics.Welford (one group)": nnx_fit,
    "E[x²] − E[x]², float32": squares(np.float32),
    "E[x²] − E[x]², float64": squares(np.float64),
    TRUTH: lambda: two_pass,
}
