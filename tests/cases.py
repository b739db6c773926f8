"""List the norms: every law is tested for every row of this table."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Part, oracle

import jaxnorm as jn

HOST = jax.devices("cpu")  # eight, whatever devices there are besides
MEAN_LOGITS = np.array([0.3, -0.5, 0.8], np.float32)
VAR_LOGITS = np.array([-0.2, 0.4, 0.1], np.float32)


def softmax(logits):
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum()


@dataclass(frozen=True)
class Case:
    """A norm as ``call(x, scale=, bias=, **options) -> y``, and its axes."""

    name: str
    call: Callable
    shape: tuple[int, ...]
    axes: tuple[int, ...]  # of the split shape
    param: tuple[int, ...]  # shape of scale and bias
    split: tuple[int, ...] | None = None
    # shape of scale and bias that broadcasts against split
    param_split: tuple[int, ...] | None = None
    epsilon: float = 1e-5
    centered: bool = True
    epsilon_in: str = "var"
    parts: tuple[Part, ...] = ()
    kernel: bool = True  # whether kernels take it
    options: dict = field(default_factory=dict, hash=False)

    def __str__(self):
        return self.name

    def __call__(self, x, **options):
        return self.call(x, **{"epsilon": self.epsilon, **options})

    @property
    def split_shape(self):
        return self.split or self.shape

    @property
    def group_axes(self):
        """Return the axes of a group within which an error is measured.

        They span the smallest groups that share statistics.
        """
        return self.axes

    def resized(self, shape):
        """Return the case for arrays of another shape with the same number of channels."""
        if self.split is None:
            return replace(self, shape=shape)
        at = next(
            i
            for i, (whole, part) in enumerate(zip(self.shape, self.split, strict=False))
            if whole != part
        )
        return replace(
            self, shape=shape, split=(*shape[:at], *self.split[at : at + 2], *shape[at + 1 :])
        )

    def params(self, rng):
        return tuple(rng.uniform(0.5, 1.5, self.param).astype(np.float32) for _ in range(2))

    def truth(self, x, *, scale=None, bias=None, where=None, cotangent=None, **options):
        """Return the oracle's result, in the shape of x."""
        x = np.asarray(x)

        def split(a, shape):
            return None if a is None else np.asarray(a).reshape(shape)

        arguments = {
            "scale": 1.0 if scale is None else split(scale, self.param_split),
            "bias": 0.0 if bias is None else split(bias, self.param_split),
            "cotangent": 0.0 if cotangent is None else split(cotangent, self.split_shape),
            "where": None
            if where is None
            else np.broadcast_to(where, self.shape).reshape(self.split_shape),
        }
        parts = self.parts or (Part(self.axes),)
        options = {"epsilon": self.epsilon, "centered": self.centered, **options}
        if self.epsilon_in != "var":  # laws know the epsilon that is added to a variance
            options["epsilon"], options["epsilon_in"] = options["epsilon"] ** 0.5, self.epsilon_in
        result = oracle(x.reshape(self.split_shape), parts, **arguments, **options)
        result.dscale_size, result.dbias_size = (
            self._reduce(np.abs(result.dscale)),
            self._reduce(np.abs(result.dbias)),
        )
        result.dscale, result.dbias = self._reduce(result.dscale), self._reduce(result.dbias)
        result.y, result.dx = result.y.reshape(self.shape), result.dx.reshape(self.shape)
        return result

    def _reduce(self, a):
        if self.param_split is None:
            return a
        axes = tuple(
            i
            for i, (s, full) in enumerate(zip(self.param_split, self.split_shape, strict=True))
            if s == 1 and full != 1
        )
        return a.sum(axes).reshape(self.param)

    def arrange(self, values):
        """Return ``(groups, n)`` values as an array whose groups hold these rows, in order."""
        others = [i for i in range(len(self.split_shape)) if i not in self.axes]
        order = others + list(self.axes)
        sizes = [self.split_shape[i] for i in order]
        return np.asarray(values).reshape(sizes).transpose(np.argsort(order)).reshape(self.shape)

    @property
    def groups(self):
        """Return the number of groups, and the number of elements of each."""
        n = int(np.prod([self.split_shape[i] for i in self.axes]))
        return int(np.prod(self.shape)) // n, n


def batch(x, **options):
    return jn.batch_norm(x, **options)[0]


def ghost(x, **options):
    return jn.ghost_batch_norm(x, num_chunks=2, **options)[0]


def renorm(x, **options):
    # Within these limits it is batch norm, whatever the running statistics are.
    running = jn.Moments(jnp.ones(()), jnp.full(x.shape[-1:], 3.0), jnp.full(x.shape[-1:], 2.0))
    return jn.batch_renorm(x, running, r_max=1.0, d_max=0.0, **options)[0]


def positional(x, **options):
    return jn.positional_norm(x, **options)[0]


def switchable(x, **options):
    return jn.switchable_norm(x, jnp.asarray(MEAN_LOGITS), jnp.asarray(VAR_LOGITS), **options)[0]


def group(x, *, groups, **options):
    return jn.group_norm(x, groups, **options)


def graph(x, **options):
    # all of the mean: what is said of shifts holds
    return jn.graph_norm(x, jnp.ones(x.shape[-1:]), **options)


def unit(x, *, epsilon, **options):
    return jn.unit_norm(x, epsilon=epsilon**0.5, **options)


def gated(x, **options):
    # an open gate, sigmoid(100) == 1: what is said of the norm holds
    gate = jnp.full(x.shape, 100, jnp.finfo(x.dtype).dtype)
    options = {"gate_first": False, "activation": "sigmoid", "num_groups": 2, **options}
    return jn.gated_rms_norm(x, gate, **options)


SWITCHABLE = tuple(
    Part(axes, *w)
    for axes, *w in zip(
        ((1, 2), (1, 2, 3), (0, 1, 2)), softmax(MEAN_LOGITS), softmax(VAR_LOGITS), strict=True
    )
)

CASES = [
    Case("layer", jn.layer_norm, (6, 77), (1,), (77,), param_split=(1, 77)),
    Case(
        "layer_hwc",
        partial(jn.layer_norm, axes=(1, 2, 3)),
        (3, 4, 5, 6),
        (1, 2, 3),
        (4, 5, 6),
        param_split=(1, 4, 5, 6),
    ),
    Case("rms", jn.rms_norm, (6, 77), (1,), (77,), param_split=(1, 77), centered=False),
    Case(
        "unit",
        unit,
        (6, 77),
        (1,),
        (77,),
        param_split=(1, 77),
        centered=False,
        epsilon_in="max",
        parts=(Part((1,), total=True),),
        kernel=False,
    ),
    Case(
        "gated",
        gated,
        (6, 78),
        (2,),
        (78,),
        split=(6, 2, 39),
        param_split=(1, 2, 39),
        centered=False,
        kernel=False,
    ),
    Case("batch", batch, (64, 5), (0,), (5,), param_split=(1, 5)),
    Case("batch_conv", batch, (4, 5, 6, 8), (0, 1, 2), (8,), param_split=(1, 1, 1, 8)),
    Case(
        "batch_nchw",
        partial(batch, feature_axes=1),
        (4, 8, 5, 6),
        (0, 2, 3),
        (8,),
        param_split=(1, 8, 1, 1),
    ),
    Case("renorm", renorm, (4, 5, 6, 8), (0, 1, 2), (8,), param_split=(1, 1, 1, 8), kernel=False),
    Case(
        "ghost",
        ghost,
        (4, 5, 6, 8),
        (1, 2, 3),
        (8,),
        split=(2, 2, 5, 6, 8),
        param_split=(1, 1, 1, 1, 8),
    ),
    Case("instance", jn.instance_norm, (3, 7, 8, 4), (1, 2), (4,), param_split=(1, 1, 1, 4)),
    Case(
        "group",
        partial(group, groups=4),
        (3, 6, 5, 8),
        (1, 2, 4),
        (8,),
        split=(3, 6, 5, 4, 2),
        param_split=(1, 1, 1, 4, 2),
    ),
    Case(
        "group_nchw",
        partial(group, groups=2, feature_axes=1),
        (3, 8, 5),
        (2, 3),
        (8,),
        split=(3, 2, 4, 5),
        param_split=(1, 2, 4, 1),
    ),
    Case(
        "filter_response",
        jn.filter_response_norm,
        (3, 7, 8, 4),
        (1, 2),
        (4,),
        param_split=(1, 1, 1, 4),
        centered=False,
    ),
    Case("positional", positional, (3, 4, 5, 24), (3,), (24,), param_split=(1, 1, 1, 24)),
    Case(
        "switchable",
        switchable,
        (3, 6, 5, 4),
        (1, 2),
        (4,),
        param_split=(1, 1, 1, 4),
        parts=SWITCHABLE,
        kernel=False,
    ),
    Case("graph", graph, (3, 30, 4), (1,), (4,), param_split=(1, 1, 4), kernel=False),
    Case(
        "pair",
        jn.pair_norm,
        (3, 30, 4),
        (1, 2),
        (4,),
        param_split=(1, 1, 4),
        parts=(Part((1,), summed=(2,)),),
        kernel=False,
    ),
]
# further layouts, left out of the laws that take long
VARIANTS = ("layer_hwc", "batch", "batch_nchw", "group_nchw", "renorm", "ghost")
DISTINCT = [case for case in CASES if case.name not in VARIANTS]
# which the README's command runs
KINDS = [case for case in DISTINCT if case.name in ("layer", "batch_conv", "group", "switchable")]
BY_NAME = {case.name: case for case in CASES}
KERNELS = [case for case in CASES if case.kernel and (case in DISTINCT or case.name == "layer_hwc")]


def long_sweep(cases, *, quick):
    """Return all cases, and mark those that are not ``quick`` as long sweeps."""
    rows = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [
        pytest.param(*values, marks=() if case in quick else pytest.mark.slow)
        for case, values in rows
    ]


def by_pallas(cases):
    """Return the norms that the Pallas kernels take: of rows, and of channels of images."""
    return [case for case in cases if case.name in ("layer", "rms", "instance", "group")]


def laws(cases, *, native=(), quick=KINDS):
    """Run a law for each case: in plain JAX, and by the kernels for cases that are ``native``.

    Some also run by the Pallas kernels, interpreted.

    Cases that are ``quick``, one norm of each kind, run at once. All others run in the
    long sweeps, which also run the reference.
    """
    rows = [
        (case, name, () if case in quick else pytest.mark.slow)
        for name, own in (("xla", cases), ("native", native), ("pallas", by_pallas(cases)))
        for case in own
    ]
    rows += [(case, "reference", pytest.mark.slow) for case in cases]
    rows = [
        pytest.param(case, name, marks=marks, id=f"{case}-{name}") for case, name, marks in rows
    ]
    return pytest.mark.parametrize(("case", "implementation"), rows, indirect=["implementation"])


# Modules of both families, and options of theirs with which they must agree to the bit.
TWINS = [
    ("LayerNorm", {}),
    ("RMSNorm", {}),
    ("UnitNorm", {"use_scale": True}),
    ("ScaleNorm", {}),
    ("InstanceNorm", {}),
    ("GroupNorm", {"num_groups": 4}),
    ("GraphNorm", {}),
    ("PairNorm", {"length": 2.0}),
    ("PositionalNorm", {"use_scale": True, "use_bias": True}),
    ("GlobalResponseNorm", {}),
    ("FilterResponseNorm", {}),
    ("FilterResponseNorm", {"learn_epsilon": True, "use_threshold": False}),
    ("ReversibleInstanceNorm", {}),
    ("EvoNormS0", {"num_groups": 4}),
    ("EvoNormB0", {"use_running_average": False}),
    ("EvoNormB0", {"use_running_average": True}),
    ("BatchNorm", {"use_running_average": False}),
    ("BatchNorm", {"use_running_average": True}),
    ("BatchRenorm", {"use_running_average": False, "warmup_steps": 0}),
    ("KerasBatchRenorm", {"use_running_average": False}),
    ("GhostBatchNorm", {"use_running_average": False, "num_chunks": 3}),
    ("SwitchableNorm", {"use_running_average": False}),
    ("SwitchableNorm", {"use_running_average": True}),
    ("DynamicTanh", {}),
    ("DynamicErf", {}),
]
