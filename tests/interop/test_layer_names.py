"""Test what names and paths decide: patterns, a module around all layers, second names."""

import re

import numpy as np
import pytest

from jaxnorm import interop


def norm(value):
    return {"scale": np.full(3, value, "float32")}


def weights(**values):
    return {name: np.full(3, value, "float32") for name, value in values.items()}


MODEL = {
    "head": norm(0),
    "layers_0": {"attention": {"q": norm(0), "k": norm(0)}, "mlp": norm(0)},
    "layers_1": {"attention": {"q": norm(0), "k": norm(0)}, "mlp": norm(0)},
}
STATE = {
    f"model.h.{i}.{name}.weight": np.full(3, 10 * i + j, "float32")
    for i in (0, 1)
    for j, name in enumerate(("attn.k_norm", "attn.q_norm", "ff"), 1)
} | {"head.weight": np.full(3, 99, "float32")}
PATTERNS = {
    "layers_*/attention/*": "model.h.*.attn.*_norm",
    "layers_*/mlp": "model.h.*.ff",
}


def scales(tree):
    return {
        path: tree[path[0]][path[1]][path[2]]["scale"][0].item()
        for path in [(f"layers_{i}", "attention", name) for i in (0, 1) for name in "qk"]
    }


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"layers_O": "model.h.0"}, "got 'layers_O'. Did you mean 'layers_1' or 'layers_0'"),
        (
            {"layers_0": "model.h.O"},
            "got 'model.h.O' for 'layers_0'. Did you mean 'model.h.1' or 'model.h.0'",
        ),
    ],
)
def test_a_misspelt_module(names, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        interop.load(MODEL, STATE, framework="torch", names=names)


def test_patterns_of_names():
    matching = interop.match(MODEL, STATE, framework="torch", names=PATTERNS)
    assert not matching.guessed
    assert {entry.by for entry in matching.entries} == {"names", "path"}
    found = interop.load(MODEL, STATE, framework="torch", names=PATTERNS)
    assert list(scales(found).values()) == [2, 1, 12, 11]
    assert [found[f"layers_{i}"]["mlp"]["scale"][0].item() for i in (0, 1)] == [3, 13]
    back = interop.save(found, framework="torch", names=PATTERNS)
    assert back.keys() == STATE.keys()
    for name, array in STATE.items():
        np.testing.assert_array_equal(back[name], array)


def test_of_patterns_the_later_and_before_patterns_a_name_decides():
    names = {
        "layers_*/attention/q": "model.h.*.attn.k_norm",
        "layers_0/attention/q": "model.h.0.attn.k_norm",
        "layers_0/attention/k": "model.h.0.attn.q_norm",
        **PATTERNS,
    }
    found = interop.load(MODEL, STATE, framework="torch", names=names)
    assert list(scales(found).values()) == [1, 2, 12, 11]


def test_patterns_may_stand_for_more_layers_than_the_file_has():
    """A model with one more layer: what it lacks is said, or allowed."""
    model = MODEL | {"layers_2": {"attention": {"q": norm(7), "k": norm(7)}, "mlp": norm(7)}}
    options = {"framework": "torch", "names": PATTERNS}
    with pytest.raises(ValueError, match=r"3 without\.\n  layers_2/attention/k/scale"):
        interop.load(model, STATE, **options)
    found = interop.load(model, STATE, **options, allow_missing="layers_2/*")
    assert list(scales(found).values()) == [2, 1, 12, 11]
    assert found["layers_2"]["mlp"]["scale"].tolist() == [7, 7, 7]


def test_patterns_that_fit_nothing_are_errors():
    with pytest.raises(ValueError, match=r"paths of the model: got 'blocks_\*/mlp'"):
        interop.load(MODEL, STATE, framework="torch", names={"blocks_*/mlp": "model.h.*.ff"})
    with pytest.raises(ValueError, match=r"each \* of their name .* got 'model\.h\.\*\.\*'"):
        interop.load(MODEL, STATE, framework="torch", names={"layers_*/mlp": "model.h.*.*"})
    with pytest.raises(ValueError, match=r"layers of the file: got 'model\.h\.0\.mlp'"):
        interop.load(MODEL, STATE, framework="torch", names={"layers_*/mlp": "model.h.*.mlp"})


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_paths_under_one_module_next_to_a_head(head, others):
    """As in checkpoints of transformers: ``model.`` in front of all but the head."""
    model = {"norm": norm(0), "layers": {"0": {"norm": norm(0)}, "1": {"norm": norm(0)}}}
    model |= {"head": norm(0)} if head else {}
    state = {"model.norm.weight": 1, "model.layers.1.norm.weight": 3}
    state |= {"model.layers.0.norm.weight": 2}
    state |= {"head.weight": 4} if head or others else {}
    matching = interop.match(model, weights(**state), framework="torch", allow_unused="head*")
    assert not matching.guessed
    assert not matching.problems
    assert [entry.theirs[0] for entry in matching.entries if entry.ours[0] != "head/scale"] == [
        "model.layers.0.norm.weight",
        "model.layers.1.norm.weight",
        "model.norm.weight",
    ]


@pytest.mark.parametrize("side", ["ours", "theirs"])
def test_the_same_path_in_two_modules_does_not_decide(side):
    if side == "theirs":
        model = {"a": norm(0), "b": norm(0)}
        state = weights(**{"left.a.weight": 1, "right.a.weight": 2, "b.weight": 3})
    else:
        model = {"left": {"a": norm(0)}, "right": {"a": norm(0)}, "b": norm(0)}
        state = weights(**{"a.weight": 1, "b.weight": 2})
    matching = interop.match(model, state, framework="torch")
    assert matching.guessed
    assert matching.problems
    by_path = [entry.ours[0] for entry in matching.entries if entry.by == "path"]
    assert by_path == ["b/scale"]


def test_names_decide_before_the_order():
    """The file has the output of attention in a module of its own, and another order."""
    model = {"attention": {name: norm(0) for name in ("key", "out", "query", "value")}}
    state = weights(
        **{
            "block.att.inner.query.weight": 1,
            "block.att.inner.value.weight": 2,
            "block.att.inner.key.weight": 3,
            "block.att.final.dense.weight": 4,
        }
    )
    matching = interop.match(model, state, framework="torch")
    assert matching.guessed
    found = {
        entry.ours[0].split("/")[1]: entry.theirs[0].split(".")[-2] for entry in matching.entries
    }
    assert found == {"key": "key", "out": "dense", "query": "query", "value": "value"}


def test_second_names_of_an_array():
    """Tied embeddings: a state dict has them twice, and the model once."""
    table = np.arange(6, dtype="float32").reshape(3, 2)
    state = {"model.embed.weight": table, "lm_head.weight": table}
    model = {"embed": {"embedding": np.zeros((3, 2), "float32")}}
    matching = interop.match(model, state, framework="torch")
    assert not matching.problems + matching.unused
    assert not matching.guessed
    assert "note: lm_head.weight is the same array as model.embed.weight" in str(matching)
    found = interop.load(model, state, framework="torch")
    found["embed"]["embedding"] = found["embed"]["embedding"] + 1
    back = interop.save(found, framework="torch", like=state)
    np.testing.assert_array_equal(back["model.embed.weight"], table + 1)
    np.testing.assert_array_equal(back["lm_head.weight"], table + 1)
    # one array for two parameters, by name
    both = model | {"head": {"kernel": np.zeros((2, 3), "float32")}}
    names = {"head": "model.embed"}
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match="head/kernel"):
        interop.load(both, state, framework="torch")
    found = interop.load(both, state, framework="torch", names=names | {"embed": "model.embed"})
    np.testing.assert_array_equal(found["head"]["kernel"], table.T)
    # an equal array in memory of its own is another parameter
    state["lm_head.weight"] = table.copy()
    with pytest.raises(ValueError, match="lm_head"):
        interop.load(model, state, framework="torch")
