"""Test the CPU kernels over several devices.

The tests check where kernels are selected, that nothing is gathered for them, and that
results equal those of one device.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from cases import long_sweep
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from wide import arguments, close, with_gradients

import jaxnorm as jn
from jaxnorm.arguments.axes import resolve
from jaxnorm.core import plan
from jaxnorm.engine.spec import Operands, Spec
from jaxnorm.kernels.cpu import loading

ROWS, WHOLE = PartitionSpec("data"), PartitionSpec()


def devices(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def layer(x, scale, bias, **options):
    return jn.layer_norm(x, scale=scale, bias=bias, **options)


def group(x, scale, bias, **options):
    return jn.group_norm(x, 4, scale=scale, bias=bias, **options)


def batch(x, scale, bias, **options):
    return jn.batch_norm(x, scale=scale, bias=bias, **options)[0]


@pytest.fixture(autouse=True)
def _kernels(library, monkeypatch):
    """Built, and selected as they are for users."""
    monkeypatch.delenv(plan.VARIABLE, raising=False)
    monkeypatch.setattr(loading, "built", lambda: True)
    jax.clear_caches()  # what is selected belongs to no signature


@pytest.mark.parametrize(
    ("norm", "shape", "kernel"),
    [(layer, (16, 33), "JaxnormForward"), (group, (8, 24, 24, 16), "JaxnormStatistics")],
)
def test_in_shard_map(norm, shape, kernel, rng):
    """Each device has its own rows or images; the mesh axes that results vary over are known."""
    x, scale, bias, cotangent = arguments(rng, shape)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=devices(AxisType.Auto),
        in_specs=(ROWS, WHOLE, WHOLE, ROWS),
        out_specs=(ROWS, ROWS, WHOLE, WHOLE),
    )
    def sharded(*given):
        return with_gradients(norm, *given)

    text = sharded.lower(x, scale, bias, cotangent).as_text()
    assert kernel in text
    assert "JaxnormBackward" in text
    close(sharded(x, scale, bias, cotangent), with_gradients(norm, x, scale, bias, cotangent), 2e-6)


@pytest.mark.parametrize(
    ("norm", "shape", "spec"),
    [
        (layer, (16, 33), ROWS),
        (group, (8, 4, 4, 16), ROWS),
        (batch, (8, 24, 24, 16), PartitionSpec(None, None, None, "model")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["shard_map", "explicit"])
def test_masks(norm, shape, spec, kind, rng):
    """Of which each device has the part that belongs to its examples."""
    x, scale, bias, cotangent = arguments(rng, shape)
    where = jnp.asarray(rng.random((*shape[:-1], 1)) < 0.6).at[1].set(False)
    own = lambda *given: with_gradients(norm, *given[:4], where=given[4])
    mesh, of_mask = devices(kind), spec if spec == ROWS else WHOLE
    of_params = WHOLE if spec == ROWS else PartitionSpec("model")
    specs = spec, of_params, of_params, spec, of_mask
    given = x, scale, bias, cotangent, where
    if kind is AxisType.Auto:
        own_sharded = jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=specs[:1] + specs[:3])
    else:
        given, own_sharded = (
            [
                jax.device_put(a, NamedSharding(mesh, spec))
                for a, spec in zip(given, specs, strict=True)
            ],
            own,
        )
    call = jax.jit(own_sharded).lower(*given)
    assert "JaxnormBackward" in call.as_text()
    close(call.compile()(*given), own(x, scale, bias, cotangent, where), 2e-6)


SHARDED = [
    (layer, (16, 33), ("data",)),
    (layer, (4, 6, 33), ("data", "model")),
    (layer, (16, 33), (("data", "model"),)),
    (group, (8, 4, 4, 16), ("data",)),
    (group, (8, 4, 4, 16), ("data", None, None, "model")),
    (group, (8, 24, 24, 16), ("data",)),
    (batch, (8, 4, 4, 16), (None, None, None, "model")),
    (batch, (8, 24, 24, 16), (None, None, None, "model")),
]


@pytest.mark.parametrize(
    ("norm", "shape", "spec"),
    long_sweep(SHARDED, quick=SHARDED[1::3]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_explicitly_sharded(norm, shape, spec, rng):
    """Unsharded groups; what is not x may be gathered, and sums of gradients are reduced."""
    given, mesh = arguments(rng, shape), devices(AxisType.Explicit)
    x_alike, whole = NamedSharding(mesh, PartitionSpec(*spec)), NamedSharding(mesh, WHOLE)
    placed = [jax.device_put(a, x_alike if a.ndim > 1 else whole) for a in given]
    call = jax.jit(partial(with_gradients, norm)).lower(*placed).compile()
    text = call.as_text()
    # of many positions XLA makes the output
    assert ("JaxnormStatistics" if 24 in shape else "JaxnormForward") in text
    assert "JaxnormBackward" in text
    assert f"f32[{','.join(map(str, shape))}]" not in text  # no device has all of x
    assert "all-to-all" not in text
    found = call(*placed)
    assert found[0].sharding.is_equivalent_to(x_alike, len(shape))
    close(found, with_gradients(norm, *given), 2e-6)


@pytest.mark.parametrize(
    ("norm", "shape", "spec"),
    [
        (layer, (16, 34), ("data", "model")),
        (batch, (8, 4, 4, 16), ("data",)),
        (group, (8, 4, 4, 16), (None, "data")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_groups_that_devices_share_are_left_to_plain_jax(norm, shape, spec, rng):
    given, mesh = arguments(rng, shape), devices(AxisType.Explicit)
    placed = [
        jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec) if a.ndim > 1 else WHOLE))
        for a in given
    ]
    call = jax.jit(norm).lower(*placed[:3]).compile()
    assert "Jaxnorm" not in call.as_text()
    close(call(*placed[:3]), norm(*given[:3]), 2e-6)


OF_X, FEATURES = (
    [(WHOLE, True), (ROWS, True), (PartitionSpec("data", None, "model"), False)],
    PartitionSpec("model"),
)
PLACES = [(*of_x, scale_spec) for of_x in OF_X for scale_spec in (WHOLE, FEATURES)]


@pytest.mark.parametrize(
    ("x_spec", "native", "scale_spec"),
    long_sweep(PLACES, quick=[(*OF_X[1], FEATURES), (*OF_X[2], WHOLE)]),
    ids=str,
)
def test_output_and_gradients_lie_as_x_and_parameters_do(x_spec, native, scale_spec, rng):
    """Whatever the parameters are sharded over, they are taken as x needs them."""
    mesh, given = devices(AxisType.Explicit), arguments(rng, (8, 6, 16))
    specs = x_spec, scale_spec, scale_spec, x_spec
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(given, specs, strict=True)
    ]
    call = jax.jit(partial(with_gradients, layer)).lower(*placed).compile()
    assert ("JaxnormForward" in call.as_text()) == native
    found = call(*placed)
    for one, like in zip(found, (placed[0], *placed[:3]), strict=True):
        assert one.sharding.is_equivalent_to(like.sharding, one.ndim)
    close(found, with_gradients(layer, *given), 2e-6)


def test_axes_that_are_not_all_manual(rng):
    """In shard_map over one axis, arrays that are explicitly sharded over the other are left to
    plain JAX.
    """
    given = arguments(rng, (8, 6, 16))[:3]
    mesh, norm = devices(AxisType.Explicit), lambda *given: (jnp.sin(layer(*given)) ** 2).sum()
    parts = jax.shard_map(
        layer, mesh=mesh, in_specs=(ROWS, WHOLE, WHOLE), out_specs=ROWS, axis_names={"data"}
    )
    placed = [
        jax.device_put(
            a, NamedSharding(mesh, PartitionSpec("data", "model") if a.ndim > 1 else WHOLE)
        )
        for a in given
    ]
    found = jax.jit(jax.grad(lambda *given: (jnp.sin(parts(*given)) ** 2).sum(), (0, 1, 2)))
    assert "Jaxnorm" not in found.lower(*placed).as_text()
    close(found(*placed), jax.grad(norm, (0, 1, 2))(*given), 2e-6)


def test_vmap_and_second_order_of_what_is_explicitly_sharded(rng):
    x, scale, bias, direction = arguments(rng, (8, 16))
    rows = NamedSharding(devices(AxisType.Explicit), ROWS)
    place = lambda a: jax.device_put(a, rows)
    second = lambda x, t: jax.jvp(
        jax.grad(lambda x: jnp.sin(layer(x, scale, bias)).sum()), (x,), (t,)
    )[1]
    close(jax.jit(second)(place(x), place(direction)), second(x, direction), 2e-5)
    each = jax.vmap(lambda gain: layer(place(x), gain, bias))(jnp.stack([scale, 2 * scale]))
    close(each, jnp.stack([layer(x, scale, bias), layer(x, 2 * scale, bias)]), 2e-6)


@pytest.mark.parametrize("name", ["layer", "lstm"])
def test_what_explicit_sharding_forbids_is_told(name, rng):
    mesh = devices(AxisType.Explicit)
    x = jax.device_put(
        jnp.ones((8, 4, 6)),
        NamedSharding(mesh, PartitionSpec(None, None, "model") if name == "layer" else ROWS),
    )
    if name == "layer":
        with pytest.raises(
            ValueError,
            match=r"reduces no axes that are sharded over devices: \(2,\) of \(8, 4, 6\), "
            r"sharded .*'model'",
        ):
            jn.standardize(x, 2, implementation="native")
    else:
        params = jn.recurrent.init_lstm(jax.random.key(0), 6, 4)
        with pytest.raises(
            ValueError, match="takes nothing that is explicitly sharded, but its part in shard_map"
        ):
            jn.recurrent.lstm(x, params, implementation="native")


def test_it_is_not_chosen_where_arrays_may_be_anywhere(monkeypatch):
    x = jnp.ones((2, 3))
    choose = partial(
        plan.select,
        None,
        "norm",
        x,
        Spec(resolve("n [c]", x.shape), dtype=x.dtype),
        Operands(x),
    )
    assert jax.device_count() == 8
    assert repr(choose()).splitlines()[:3:2] == [
        "xla",
        "  not native: there are several devices, and x may lie on any of them",
    ]
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert repr(choose()) == (
        "native\n  not reference: a kernel takes these arguments\n"
        "  not xla: a kernel takes these arguments\n"
        "  not pallas: JAX runs on platform cpu, and the kernels are for TPUs and GPUs"
    )
    monkeypatch.setattr(loading, "built", lambda: False)
    assert choose().implementation == "xla"
