"""Cut hard inputs in all ways of test_cuts.py, and compute the result in one piece."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from cases import HOST
from cut_inputs import BOUNDS, K, N, by_input, ids_of
from flax import nnx as flax_nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from oracle import Part, oracle

import jaxnorm as jn
from jaxnorm import linen, nnx, online

shard_map = jax.shard_map if hasattr(jax, "shard_map") else jax.experimental.shard_map.shard_map
MESH = Mesh(np.array(HOST), ("d",))
TOGETHER = Part((0, 1))  # of the positions and channels of a group


@dataclass(frozen=True)
class Way:
    """A way of cutting: ``run(x, scale, bias, where, epsilon) -> y, (moments, running)``.

    Each result may be None.
    """

    name: str
    run: Callable
    fold: int = 1
    segments: bool = False
    over_devices: bool = False
    part: Part = TOGETHER
    # not by Moments, to which x gives a gradient of its own, and which do not have the range of x
    fused: bool = True
    # of microbatches one after the other, of which those that are not finite leave the statistics
    # alone
    bounds: tuple[int, ...] = ()
    statistics: bool = True  # whether there are Moments or running statistics
    whole: bool = True  # whether outputs are those of the whole, not of microbatches by themselves
    mask: str = "where"  # what errors call it

    def __str__(self):
        return self.name

    def labels(self, outputs=False):
        """Return the group of each position: for the statistics, or for the output."""
        if self.segments:
            return ids_of(N // self.fold)
        return (
            np.searchsorted(self.bounds, np.arange(N), "right")
            if outputs and not self.whole
            else np.zeros(N // self.fold, int)
        )


def locally(run, **options):
    return lambda x, scale, bias, where, epsilon: run(x, scale, bias, where, epsilon, **options)


def over_devices(run, segments=False):
    """Split rows of x, mask and ids over eight devices, and keep the rest whole."""

    def call(x, scale, bias, where, epsilon):
        def local(x, scale, bias, where, ids):
            return run(
                x, scale, bias, where, epsilon, axis_name="d", **({"ids": ids} if segments else {})
            )

        specs = P("d"), P(), P(), P("d"), P("d")
        return shard_map(local, mesh=MESH, in_specs=specs, out_specs=(P("d"), P()))(
            x, scale, bias, where, jnp.asarray(ids_of(N))
        )

    return call


def batch_norm(x, scale, bias, where, epsilon, axis_name=None):
    y, found = jn.batch_norm(
        x, scale=scale, bias=bias, where=where, epsilon=epsilon, axis_name=axis_name
    )
    return y, (found, None)


def cut(x, where, bounds=BOUNDS):
    return [(x[i:j], None if where is None else where[i:j]) for i, j in pairwise(bounds)]


def merged(x, scale, bias, where, epsilon):
    found = jn.merge(*(jn.moments(part, 0, where=mask) for part, mask in cut(x, where)))
    return jn.normalize(x, found, scale=scale, bias=bias, where=where, epsilon=epsilon), (
        found,
        None,
    )


def by_stages(x, scale, bias, where, epsilon, bounds=BOUNDS[1:]):
    """Run a norm by stages. In the last stage 0 stands behind the mask, as in the norm itself."""

    def last(params, h, batch):
        y = h * params[0][None] + params[1][None]
        return y if where is None else jnp.where(batch[1], y, 0)

    run = online.stages(
        [lambda params, h, batch: batch[0], last],
        epsilon=epsilon,
        where=None if where is None else lambda batch: batch[1],
    )
    outputs, (found,) = run((scale, bias), cut(x, where, bounds))
    return jnp.concatenate(outputs), (
        jax.tree.map(lambda leaf: leaf[None] if leaf.ndim == 1 else leaf, found),
        None,
    )


def observed(x, scale, bias, where, epsilon):
    """Return the online state of each channel.

    Weights there count whole elements. Masked elements are not normalized.
    """
    start = jax.tree.map(
        lambda leaf: jnp.zeros(x.shape[1], leaf.dtype), online.init(jnp.zeros((), x.dtype))
    )
    for part, mask in cut(x, where):
        update = lambda state, x, w: online.update(state, x, weights=w)
        start = jax.vmap(update, (0, 1, None if mask is None else 1))(start, part, mask)
    shown = x if where is None else jnp.where(where, x, 0)
    y = jax.vmap(partial(online.normalize, epsilon=epsilon), (1, 0), 1)(shown, start)
    y = y * scale[None].astype(y.dtype) + bias[None].astype(y.dtype)
    return y if where is None else jnp.where(where, y, 0), (
        jax.tree.map(lambda leaf: leaf[None], start),
        None,
    )


def module(family, name, count, scale, bias, **options):
    """Return a module with these parameters, as ``call(x, **given) -> y, running``."""
    if family == "nnx":
        norm = getattr(nnx, name)(count, **options, param_dtype=scale.dtype, rngs=flax_nnx.Rngs(0))
        norm.scale[...], norm.bias[...] = scale, bias
        return norm
    norm = getattr(linen, name)(**options)
    params = {"scale": scale, "bias": bias} | (
        {"mean_scale": jnp.ones(count)} if name == "GraphNorm" else {}
    )
    return norm, {"params": params}


def output_dtype(x):
    """Return the dtype of the output: of x, which is narrower than the parameters."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else None


def batch_module(x, scale, bias, where, epsilon, family, axis_name=None, bounds=None):
    """Return output and running statistics of a module, from 0 and 1.

    ``bounds`` are the bounds of microbatches that accumulate.
    """
    options = {
        "dtype": output_dtype(x),
        "momentum": 0.9,
        "epsilon": epsilon,
        "use_running_average": False,
        "axis_name": axis_name,
    }
    parts = [(x, where)] if bounds is None else cut(x, where, bounds)
    made = module(family, "BatchNorm", x.shape[1], scale, bias, **options)
    if family == "nnx":
        if bounds is not None:
            nnx.accumulate(made)
        ys = [made(part, mask=mask) for part, mask in parts]
        return jnp.concatenate(ys), (None, (made.mean[...], made.var[...]))
    norm, variables = made
    variables["batch_stats"] = {"mean": jnp.zeros(x.shape[1]), "var": jnp.ones(x.shape[1])}
    variables, ys = variables if bounds is None else linen.accumulate(variables), []
    for part, mask in parts:
        y, updated = norm.apply(
            variables, part, mask=mask, mutable=["batch_stats", "batch_moments"]
        )
        variables, ys = {**variables, **updated}, [*ys, y]
    return jnp.concatenate(ys), (
        None,
        (variables["batch_stats"]["mean"], variables["batch_stats"]["var"]),
    )


def of_segments(x, scale, bias, where, epsilon, ids=None, axis_name=None, axes=0):
    by = {
        "segments": ids_of(x.shape[0 if axes == 0 else 1]) if ids is None else ids,
        "num_segments": K,
    }
    scale, bias = (a.reshape((1,) * (x.ndim - 1) + a.shape) for a in (scale, bias))
    options = {"scale": scale, "bias": bias, "where": where, "epsilon": epsilon}
    found = jn.moments(x, axes, where=where, axis_name=axis_name, **by)
    return jn.standardize(x, axes, **options, axis_name=axis_name, **by), (found, None)


def applied_to_segments(x, scale, bias, where, epsilon):
    """Normalize microbatches by the Moments of their segments, merged over the microbatches."""
    ids = [ids_of(N)[i:j] for i, j in pairwise(BOUNDS)]
    parts = [
        jn.moments(x, 0, where=w, segments=i, num_segments=K)
        for (x, w), i in zip(cut(x, where), ids, strict=True)
    ]
    found, options = (
        jn.merge(*parts),
        {"scale": scale[None], "bias": bias[None], "where": where, "epsilon": epsilon},
    )
    return jn.normalize(x, found, axes=0, segments=ids_of(N), **options), (found, None)


def segment_module(x, scale, bias, where, epsilon, family, name, **options):
    made = module(
        family, name, x.shape[-1], scale, bias, dtype=output_dtype(x), epsilon=epsilon, **options
    )
    by = {"segments": ids_of(x.shape[-2]), "num_segments": K, "mask": where}
    return made(x, **by) if family == "nnx" else made[0].apply(made[1], x, **by), (None, None)


PAIR = {"fold": 2, "segments": True, "statistics": False, "part": Part((0,), summed=(1,))}
WIDE = {"reduction_axes": (-2, -1), "feature_axes": -1}
WAYS = [
    Way("devices", over_devices(batch_norm), over_devices=True),
    Way("merge", merged, fused=False),
    Way("stages", by_stages, fused=False),
    Way("stacked_stages", locally(by_stages, bounds=range(0, N + 1, N // 8)), fused=False),
    Way("online", observed, fused=False, bounds=BOUNDS, mask="weights"),
    Way("segments", of_segments, segments=True),
    Way("segments_of_two_axes", locally(of_segments, axes=(-2, -1)), fold=2, segments=True),
    Way(
        "segments_over_devices",
        over_devices(of_segments, segments=True),
        segments=True,
        over_devices=True,
    ),
    Way("segments_of_microbatches", applied_to_segments, segments=True, fused=False),
]
for family in ("linen", "nnx"):
    of_family = partial(locally, family=family)
    WAYS += [
        Way(
            f"{family}_devices",
            over_devices(partial(batch_module, family=family)),
            over_devices=True,
            mask="mask",
        ),
        Way(
            f"{family}_accumulate",
            of_family(batch_module, bounds=BOUNDS),
            bounds=BOUNDS,
            whole=False,
            mask="mask",
        ),
        Way(
            f"{family}_instance",
            of_family(segment_module, name="InstanceNorm"),
            segments=True,
            statistics=False,
            mask="mask",
        ),
        Way(
            f"{family}_graph",
            of_family(segment_module, name="GraphNorm"),
            segments=True,
            statistics=False,
            mask="mask",
        ),
        Way(
            f"{family}_pair",
            of_family(segment_module, name="PairNorm", use_scale=True, use_bias=True),
            **PAIR,
            mask="mask",
        ),
        Way(
            f"{family}_layer",
            of_family(segment_module, name="LayerNorm", **WIDE),
            fold=2,
            segments=True,
            statistics=False,
            mask="mask",
        ),
    ]


@dataclass(frozen=True)
class Piece:
    """A group and its true values: positions ``at`` of one input.

    Those in ``shown`` count.
    """

    name: str
    row: int
    label: int
    at: np.ndarray
    shown: np.ndarray
    bias: np.ndarray
    count: float
    mean: float
    var: float
    y: np.ndarray
    dx: np.ndarray
    dscale: np.ndarray
    dbias: np.ndarray
    terms: float  # the largest of the terms that dx is the sum of, which in a small group cancel

    @property
    def is_finite(self):
        return bool(np.isfinite(self.var))

    @property
    def dx_size(self):
        return np.abs(self.dx).max(initial=0) if self.count >= 8 else self.terms


def pieces(given, labels, *, fold=1, part=TOGETHER, epsilon=1e-5, bounds=()):
    """Return the groups of each input, by their labels.

    Microbatches that are not finite are left out.
    """
    x, cotangent = (by_input(a, fold).astype(np.float64) for a in (given.x, given.cotangent))
    where = np.ones(x.shape, bool) if given.where is None else by_input(given.where, fold).copy()
    for i, j in pairwise(bounds):
        where[:, i:j] &= (np.isfinite(x) | ~where)[:, i:j].all((1, 2), keepdims=True)
    for row, name in enumerate(given.names):
        params = [a[row] if fold == 1 else a for a in (given.scale, given.bias)]
        for label in np.unique(labels):
            at = np.nonzero(labels == label)[0]
            yield piece(
                name,
                row,
                label,
                at,
                where[row, at],
                x[row, at],
                cotangent[row, at],
                *params,
                part,
                epsilon,
            )


@np.errstate(all="ignore")
def piece(name, row, label, at, shown, x, cotangent, scale, bias, part, epsilon):
    of = oracle(
        x, (part,), epsilon=epsilon, scale=scale, bias=bias, cotangent=cotangent, where=shown
    )
    groups = [c[s] for c, s in zip(x.T, shown.T, strict=True)] if part.summed else [x[shown]]
    means, variances = zip(*(about_the_first(values) for values in groups), strict=True)
    mean, var = means[0], sum(variances)
    terms = np.abs(cotangent * scale).max() / np.sqrt(var + epsilon)
    return Piece(
        name,
        row,
        int(label),
        at,
        shown,
        bias,
        int(shown.sum()),
        mean,
        var,
        of.y,
        of.dx,
        of.dscale,
        of.dbias,
        terms,
    )


def about_the_first(values):
    """Return mean and variance without loss to a large mean; 0 for no elements."""
    if not len(values):
        return 0.0, 0.0
    rest = values - values[0]
    return values[0] + rest.mean(), rest.var()
