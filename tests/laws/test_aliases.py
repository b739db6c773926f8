"""Test that each of an argument's two names gives the same result, and both at once an error."""

import inspect
import re
import typing
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.nnx import Rngs

import jaxnorm as jn
from jaxnorm import host, linen, nnx
from jaxnorm.arguments import keywords

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(4, 5, 6)).astype(np.float32)  # nothing is compiled while tests are collected
NODES, IDS, LOGITS = X[0], np.array([0, 1, 1, 0, 1]), np.zeros(3, np.float32)
STEPS = np.arange(5) < np.array([5, 3, 1, 4])[:, None]
BY_STEP = np.broadcast_to(IDS, (4, 5))
MASK, MASK_OF_NODES = STEPS[..., None], np.array([1, 1, 0, 1, 1], bool)[:, None]
OF_NODES = MappingProxyType({"segments": IDS, "num_segments": 2})


def moments():
    return jn.moments(NODES, "[n] c", **OF_NODES)


def network(name, **given):
    params = getattr(jn.recurrent, f"init_{name}")(jax.random.key(0), 6, 3)
    return getattr(jn.recurrent, name)(X, params, **given)


# of each function a call that lacks the mask, and one that lacks the segments
MASKED = {
    "batch_norm": partial(jn.batch_norm, X),
    "batch_renorm": lambda **given: jn.batch_renorm(X, jn.moments(X, "[n t] c"), **given),
    "ghost_batch_norm": partial(jn.ghost_batch_norm, X, size=2),
    "layer_norm": partial(jn.layer_norm, X),
    "rms_norm": partial(jn.rms_norm, X),
    "unit_norm": partial(jn.unit_norm, X),
    "scale_norm": partial(jn.scale_norm, X, 2.0),
    "add_norm": partial(jn.add_norm, X, X),
    "gated_rms_norm": partial(jn.gated_rms_norm, X, X, gate_first=True),
    "instance_norm": partial(jn.instance_norm, X),
    "ada_instance_norm": partial(jn.ada_instance_norm, X, X),
    "group_norm": partial(jn.group_norm, X, 2),
    "positional_norm": partial(jn.positional_norm, X),
    "switchable_norm": partial(jn.switchable_norm, X, LOGITS, LOGITS),
    "graph_norm": partial(jn.graph_norm, NODES, np.ones(6, np.float32), **OF_NODES),
    "pair_norm": partial(jn.pair_norm, NODES, **OF_NODES),
    "evonorm_s0": partial(jn.evonorm_s0, X, np.ones(6, np.float32), num_groups=2),
    "evonorm_b0": partial(jn.evonorm_b0, X, np.ones(6, np.float32)),
    "filter_response_norm": partial(jn.filter_response_norm, X),
    "global_response_norm": partial(jn.global_response_norm, X),
    "reversible_instance_norm": partial(jn.reversible_instance_norm, X),
    "reverse_instance_norm": lambda **given: jn.reverse_instance_norm(
        X, jn.moments(X, "n [t] c"), **given
    ),
    "dynamic_tanh": partial(jn.dynamic_tanh, X, 0.5),
    "dynamic_erf": partial(jn.dynamic_erf, X, 0.5, 0.1),
    "standardize": partial(jn.standardize, X, "n [t] (g [c])", g=2),
    "moments": partial(jn.moments, X, "n [t] c"),
    "quantize": partial(jn.quantize, X, "n [t] c"),
    "normalize": lambda **given: jn.normalize(X, jn.moments(X, "n [t] c"), **given),
    "plan": partial(jn.plan, X, "n [t] c"),
    "host.moments": partial(host.moments, X, "n [t] c"),
    **{name: partial(network, name) for name in ("rnn", "gru", "lstm")},
}
SEGMENTED = {
    "layer_norm": partial(jn.layer_norm, NODES, axes=(0, 1), num_segments=2),
    "instance_norm": partial(jn.instance_norm, NODES, num_segments=2),
    "graph_norm": partial(jn.graph_norm, NODES, np.ones(6, np.float32), num_segments=2),
    "pair_norm": partial(jn.pair_norm, NODES, num_segments=2),
    "standardize": partial(jn.standardize, NODES, "[n] c", num_segments=2),
    "moments": partial(jn.moments, NODES, "[n] c", num_segments=2),
    "normalize": lambda **given: jn.normalize(NODES, moments(), axes="[n] c", **given),
    "plan": partial(jn.plan, NODES, "[n] c", num_segments=2),
    "merge": lambda **given: jn.moments(NODES, "n [c]").merge("[n] c", num_segments=2, **given),
    **{name: partial(network, name) for name in ("rnn", "gru", "lstm")},
}
OPTIONS = {
    "GroupNorm": {"num_groups": 2},
    "BatchNorm": {"use_running_average": True},
    "BatchRenorm": {"use_running_average": True},
    "KerasBatchRenorm": {"use_running_average": True},
    "GhostBatchNorm": {"use_running_average": True, "num_chunks": 2},
    "SwitchableNorm": {"use_running_average": True},
    "EvoNormB0": {"use_running_average": True},
    "EvoNormS0": {"num_groups": 2},
    "ConditionalBatchNorm": {"use_running_average": True},
    "SPADE": {"kernel_size": (3,), "hidden_features": 2},
    "GatedRMSNorm": {"gate_first": True},
}
CONDITIONS = {  # what these modules take at the call, besides x
    "AdaLayerNorm": X[:, 0],
    "AdaLayerNormZero": X[:, 0],
    "FiLM": X[:, 0],
    "AdaInstanceNorm": X[:, 0],
    "ConditionalBatchNorm": X[:, 0],
    "SPADE": X,
    "GatedRMSNorm": X,
    "QKNorm": X,
}
OF_ONE_SIZE = ("GatedRMSNorm", "QKNorm")  # x and the other array
NETWORKS = ("LSTM", "GRU", "SimpleRNN")
AXES = {"LayerNorm": {"reduction_axes": (0, 1), "feature_axes": (1,)}}  # of packed sequences


def modules(argument):
    return [name for name in linen.__all__ if argument in accepted(getattr(linen, name).__call__)]


def accepted(function):
    """The names of the arguments, those of options included."""
    for name, parameter in inspect.signature(function).parameters.items():
        typed = typing.get_args(parameter.annotation) if name == "options" else ()
        yield from (name, *(typed[0].__annotations__ if typed else ()))


def call_of(family, name, argument):
    """A module's call that lacks an argument."""
    packed = argument == "segments" and name not in NETWORKS
    x = NODES if packed or name in ("GraphNorm", "PairNorm") else X
    options = {**OPTIONS.get(name, {}), **(AXES.get(name, {}) if packed else {})}
    given = {"num_segments": 2} if packed else {}
    width = (3,) if name in NETWORKS else ()
    inputs = (x, CONDITIONS[name]) if name in CONDITIONS else (x,)
    if family is nnx:
        others = () if name in OF_ONE_SIZE else inputs[1:]
        sizes = (6, *width, *(array.shape[-1] for array in others))
        return partial(getattr(nnx, name)(*sizes, **options, rngs=Rngs(0)), *inputs, **given)
    module = getattr(linen, name)(*width, **options)
    own = {"segments": IDS} if packed else {}
    variables = module.init(jax.random.key(0), *inputs, **given, **own)
    return partial(module.apply, variables, *inputs, **given)


def value_of(name, argument):
    """What is given: a mask or ids for each step, node or element."""
    of_steps = name in (*NETWORKS, "rnn", "gru", "lstm")
    if argument == "segments":
        return BY_STEP if of_steps else IDS
    of_nodes = name in ("graph_norm", "pair_norm", "GraphNorm", "PairNorm")
    return STEPS if of_steps else MASK_OF_NODES if of_nodes else MASK


ROWS = [(None, name, "where", "mask") for name in MASKED]
ROWS += [(None, name, "segments", "segment_ids") for name in SEGMENTED]
for family in (linen, nnx):
    ROWS += [(family, name, "mask", "where") for name in modules("mask")]
    ROWS += [(family, name, "segments", "segment_ids") for name in modules("segments")]


def made(family, name, argument):
    if family is not None:
        return call_of(family, name, argument)
    return (SEGMENTED if argument == "segments" else MASKED)[name]


def ident(row):
    family, name, _, alias = row
    return (
        f"{'' if family is None else family.__name__.removeprefix('jaxnorm.') + '.'}{name}-{alias}"
    )


@pytest.mark.parametrize("row", ROWS, ids=ident)
def test_an_argument_is_the_same_by_either_name(row):
    family, name, argument, alias = row
    call, value = made(family, name, argument), value_of(name, argument)
    if name == "plan":
        assert str(call(**{alias: value})) == str(call(**{argument: value}))
        return
    ways = [lambda v, given=given: call(**{given: v}) for given in (argument, alias)]
    if name == "host.moments":
        jax.tree.map(np.testing.assert_array_equal, *(vars(way(value)) for way in ways))
        return
    # the same program has the same values
    wanted, got = (jax.jit(way).lower(value) for way in ways)
    assert jax.tree.leaves(wanted.out_info)
    assert wanted.as_text() == got.as_text()


@pytest.mark.parametrize("row", ROWS, ids=ident)
def test_both_names_at_once_are_refused(row):
    family, name, argument, alias = row
    call, value = made(family, name, argument), value_of(name, argument)
    both = f"`{argument}` and `{alias}` are two names of one argument: got both."
    said = rf"^{re.escape(both)} Pass {argument} alone\."
    for run in (call, lambda **given: jax.eval_shape(lambda: call(**given))):
        with pytest.raises(TypeError, match=said):
            run(**{argument: value, alias: value})


def test_the_tables_have_every_function():
    public = {
        name: getattr(module, name)
        for module in (jn, jn.recurrent)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }
    public |= {"merge": jn.Moments.merge, "host.moments": host.moments}
    for argument, table in (("where", MASKED), ("segments", SEGMENTED)):
        taking = {name for name, function in public.items() if argument in accepted(function)}
        assert taking | {"plan"} == table.keys()  # which takes what standardize does
    assert not any(
        {"segment_ids", "where"} & {*accepted(getattr(family, name).__call__)}
        for family in (linen, nnx)
        for name in family.__all__
    )


def test_a_module_has_the_same_aliases_in_both_families():
    for argument in ("mask", "segments"):
        assert modules(argument) == [
            name for name in nnx.__all__ if argument in accepted(getattr(nnx, name).__call__)
        ]


def test_by_position_and_by_an_alias_is_both():
    norm = nnx.RMSNorm(6, rngs=Rngs(0))
    with pytest.raises(TypeError, match="`mask` and `where` are two names of one argument: got"):
        norm(X, MASK, where=MASK)


@pytest.mark.parametrize("call", [jn.layer_norm, partial(jn.standardize, axes=-1)])
def test_none_is_no_argument(call):
    wanted = call(X, where=MASK)
    for given in ({"where": None, "mask": MASK}, {"where": MASK, "mask": None}):
        np.testing.assert_array_equal(call(X, **given), wanted)
    np.testing.assert_array_equal(call(X, mask=None), call(X))


def test_a_name_in_a_pattern_is_a_size():
    wanted = jn.moments(X, "n [t] (g [c])", g=2, where=MASK)
    for found in (
        jn.moments(X, "n [t] (mask [c])", mask=2, where=MASK),
        jn.moments(X, "n [t] (segment_ids [c])", segment_ids=2, mask=MASK),
    ):
        np.testing.assert_array_equal(found.var, wanted.var)
    with pytest.raises(TypeError, match="mask must be an argument, or the size of a name"):
        jn.moments(X, 0).merge(1, mask=MASK)


def test_errors_say_the_name():
    with pytest.raises(ValueError, match="where must broadcast against x"):
        jn.layer_norm(X, mask=np.ones((3, 1), bool))
    with pytest.raises(ValueError, match="mask must broadcast against x"):
        nnx.LayerNorm(6, rngs=Rngs(0))(X, where=np.ones((3, 1), bool))


def test_right_names_cost_nothing(monkeypatch):
    """Aliases are looked at where an unknown keyword comes."""

    def refuse(*_):
        raise AssertionError

    norm = nnx.LayerNorm(6, rngs=Rngs(0))
    monkeypatch.setattr(keywords, "by_name", refuse)
    jn.layer_norm(X, where=MASK, axes=-1)
    jn.standardize(X, "n [t] c", where=MASK)
    network("rnn", where=STEPS)
    norm(jnp.asarray(X), mask=MASK)
    jn.standardize(X, "n [t] (g [c])", g=2)
    with pytest.raises(AssertionError):
        jn.layer_norm(X, mask=MASK)
