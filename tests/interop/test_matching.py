"""Test which layer of a file goes to which layer of a model, and what is said of the rest."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from interop_values import dense, ones, state

from jaxnorm import interop
from jaxnorm import linen as jnn

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
KEY = jax.random.key(0)


def found(like, source, **options):
    """The keys of the file by the leaves of the model, and how each layer was found."""
    matching = interop.match(like, source, framework="torch", **options)
    assert matching.problems == []
    return {entry.ours[0]: (entry.theirs[0], entry.by) for entry in matching.entries}


class TestPaths:
    def test_separators(self):
        like = {"layers_0": {"attn": {"q": dense(2, 3)}}, "layers_1": {"attn": {"q": dense(2, 3)}}}
        source = state(layers__1__attn__q__weight=(3, 2), layers__0__attn__q__weight=(3, 2))
        assert found(like, source) == {
            "layers_0/attn/q/kernel": ("layers.0.attn.q.weight", "path"),
            "layers_1/attn/q/kernel": ("layers.1.attn.q.weight", "path"),
        }

    @pytest.mark.parametrize("side", ["ours", "theirs"])
    def test_a_prefix_of_one_side(self, side):
        like = {"a": dense(2, 3), "b": dense(2, 3)}
        source = state(b__weight=(3, 2), a__weight=(3, 2))
        if side == "ours":
            like = {"params": {"backbone": like}}
        else:
            source = {f"model.{key}": value for key, value in source.items()}
        assert {by for _, by in found(like, source).values()} == {"path"}
        assert [key[-8:] for key, _ in found(like, source).values()] == ["a.weight", "b.weight"]

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [((0, 1, 2), (0, 2, 4)), ((0, 2, 4), (0, 1, 2)), ((0, 1, 2), (1, 2, 3)), ((0, 1), (1, 3))],
    )
    def test_numbers_that_count_otherwise_are_an_order(self, ours, theirs):
        """An activation counts in a Sequential, and in a list of layers there is none."""
        like = {f"layers_{i}": dense(3, 3) for i in ours}
        source = state(**{f"layers__{i}__weight": (3, 3) for i in theirs})
        expected = {
            f"layers_{a}/kernel": (f"layers.{b}.weight", f"order of {len(ours)}")
            for a, b in zip(ours, theirs, strict=True)
        }
        assert found(like, source) == expected

    def test_numbers_of_a_part_are_equal_paths(self):
        like = {f"layers_{i}": dense(3, 3) for i in (0, 2)}
        source = state(**{f"layers__{i}__weight": (3, 3) for i in range(4)})
        assert found(like, source, allow_unused=True) == {
            f"layers_{i}/kernel": (f"layers.{i}.weight", "path") for i in (0, 2)
        }

    def test_shapes_of_equal_paths_must_fit(self):
        with pytest.raises(ValueError, match=r"fc/kernel \(2, 3\): fc\.weight \(2, 3\) gives"):
            interop.load({"fc": dense(2, 3)}, state(fc__weight=(2, 3)), framework="torch")

    def test_nothing_is_shown(self, capsys):
        interop.load({"fc": dense(2, 3)}, state(fc__weight=(3, 2)), framework="torch")
        assert capsys.readouterr() == ("", "")
        interop.load({"fc": dense(2, 3)}, state(fc__weight=(3, 2)), framework="torch", show=True)
        assert "transposed  path" in capsys.readouterr().err


class TestGuesses:
    def test_sizes(self, capsys):
        like = {"Dense_0": dense(2, 3), "Dense_1": dense(3, 5), "LayerNorm_0": {"scale": ones(5)}}
        source = state(norm__weight=(5,), last__weight=(5, 3), first__weight=(3, 2))
        assert found(like, source) == {
            "Dense_0/kernel": ("first.weight", "shape"),
            "Dense_1/kernel": ("last.weight", "shape"),
            "LayerNorm_0/scale": ("norm.weight", "shape"),
        }
        interop.load(like, source, framework="torch")
        assert "Dense_0/kernel     (2,3)  Dense  first.weight" in capsys.readouterr().err
        interop.load(like, source, framework="torch", show=False)
        assert capsys.readouterr().err == ""

    def test_order_of_as_large_ones(self):
        """Numbers count calls, and the file is in the order of definition."""
        like = {f"Dense_{i}": dense(3, 3) for i in (0, 1, 10, 2)}
        source = state(**{f"{name}__weight": (3, 3) for name in ("q", "k", "v", "o")})
        expected = dict(zip((0, 1, 2, 10), "qkvo", strict=True))
        assert found(like, source) == {
            f"Dense_{i}/kernel": (f"{name}.weight", "order of 4") for i, name in expected.items()
        }
        # a file that is sorted is in no such order: by number
        source = state(**{f"fc{i}__weight": (3, 3) for i in (1, 10, 2, 3)})
        assert [key for key, _ in found(like, source).values()] == [
            f"fc{i}.weight" for i in (1, 2, 3, 10)
        ]

    def test_transposed_shapes_are_told_apart(self):
        like = {"Dense_0": dense(2, 3), "Dense_1": dense(3, 2)}
        source = state(b__weight=(2, 3), a__weight=(3, 2))
        assert [key for key, _ in found(like, source).values()] == ["a.weight", "b.weight"]

    def test_more_in_the_file_than_in_the_model(self):
        like = {"Dense_0": dense(3, 3), "Dense_1": dense(3, 3)}
        source = state(a__weight=(3, 3), b__weight=(3, 3), c__weight=(3, 3))
        with pytest.raises(
            ValueError, match=r"Dense_1/kernel .* as large are a\.weight \(3, 3\), b"
        ):
            interop.load(like, source, framework="torch", allow_unused=True)
        names = {"Dense_0": "c", "Dense_1": "a"}
        assert found(like, source, names=names, allow_unused=True) == {
            "Dense_0/kernel": ("c.weight", "names"),
            "Dense_1/kernel": ("a.weight", "names"),
        }

    def test_a_residual_network(self):
        """The stem's norm is as large as those of the blocks, which come before it by name."""

        class Block(linen.Module):
            features: int
            stride: int

            @linen.compact
            def __call__(self, x):
                y = linen.Conv(self.features, (3, 3), self.stride, use_bias=False)(x)
                y = linen.relu(jnn.BatchNorm(use_running_average=True)(y))
                y = linen.Conv(self.features, (3, 3), use_bias=False)(y)
                y = jnn.BatchNorm(use_running_average=True)(y)
                if x.shape != y.shape:
                    x = linen.Conv(self.features, (1, 1), self.stride, use_bias=False)(x)
                    x = jnn.BatchNorm(use_running_average=True)(x)
                return linen.relu(x + y)

        class ResNet(linen.Module):
            @linen.compact
            def __call__(self, x):
                x = linen.Conv(4, (7, 7), 2, use_bias=False)(x)
                x = jnn.BatchNorm(use_running_average=True)(x)
                for features, stride in ((4, 1), (4, 1), (6, 2), (6, 1)):
                    x = Block(features, stride)(x)
                return linen.Dense(10)(x.mean((1, 2)))

        norm = lambda name, size: (
            {
                f"{name}.{leaf}": (size,)
                for leaf in ("weight", "bias", "running_mean", "running_var")
            }
            | {f"{name}.num_batches_tracked": ()}
        )
        shapes = {"conv1.weight": (4, 3, 7, 7)} | norm("bn1", 4)
        width = 4
        for stage, features in enumerate((4, 6), 1):
            for i in range(2):
                block = f"layer{stage}.{i}"
                shapes[f"{block}.conv1.weight"] = (features, width, 3, 3)
                shapes |= norm(f"{block}.bn1", features)
                shapes[f"{block}.conv2.weight"] = (features, features, 3, 3)
                shapes |= norm(f"{block}.bn2", features)
                if width != features:
                    shapes[f"{block}.downsample.0.weight"] = (features, width, 1, 1)
                    shapes |= norm(f"{block}.downsample.1", features)
                width = features
        source = state(**shapes, **{"fc.weight": (10, 6), "fc.bias": (10,)})
        like = jax.eval_shape(jax.jit(ResNet().init), KEY, jnp.ones((1, 8, 8, 3)))
        pairs = {ours: theirs for ours, (theirs, _) in found(like, source).items()}
        stages = {"Block_0": "layer1.0", "Block_1": "layer1.1"}
        stages |= {"Block_2": "layer2.0", "Block_3": "layer2.1"}
        for block, name in stages.items():
            for kind, theirs in (("Conv", "conv"), ("BatchNorm", "bn")):
                leaf = "kernel" if kind == "Conv" else "scale"
                for i in range(2):
                    ours = f"params/{block}/{kind}_{i}/{leaf}"
                    assert pairs[ours] == f"{name}.{theirs}{i + 1}.weight"
        assert pairs["params/BatchNorm_0/scale"] == "bn1.weight"
        assert pairs["params/Block_2/BatchNorm_2/bias"] == "layer2.0.downsample.1.bias"
        assert pairs["batch_stats/Block_3/BatchNorm_1/var"] == "layer2.1.bn2.running_var"
        assert len(pairs) == len(jax.tree.leaves(like))


class TestNames:
    @pytest.fixture(autouse=True)
    def _model(self):
        self.like = {
            "enc": {"Dense_0": dense(3, 3), "Dense_1": dense(3, 3)},
            "head": dense(3, 3),
        }
        self.source = state(a__weight=(3, 3), m__x__weight=(3, 3), m__y__weight=(3, 3))

    @pytest.mark.parametrize(
        "names",
        [
            {"enc/Dense_0": "m.y", "enc/Dense_1": "m.x", "head": "a"},
            {"params.enc.Dense_0": "m.y"},
            {"enc/Dense_0/kernel": "m.y.weight", "head": "a"},
            lambda path: {"enc/Dense_0": "m.y", "head": "a"}.get(path),
        ],
        ids=["layers", "with the collection", "a leaf", "a function"],
    )
    def test_layers(self, names):
        pairs = found(self.like, self.source, names=names)
        assert {ours: theirs for ours, (theirs, _) in pairs.items()} == {
            "enc/Dense_0/kernel": "m.y.weight",
            "enc/Dense_1/kernel": "m.x.weight",
            "head/kernel": "a.weight",
        }

    def test_modules(self):
        pairs = found(self.like, self.source, names={"enc": "m", "head": "a"})
        assert pairs["enc/Dense_0/kernel"] == ("m.x.weight", "order of 2")
        like = {"enc": {"y": dense(3, 3), "x": dense(3, 3)}, "head": dense(3, 3)}
        assert found(like, self.source, names={"enc": "m"})["enc/y/kernel"] == (
            "m.y.weight",
            "names",
        )

    def test_a_layer_that_keeps_its_values(self):
        names = {"enc": None, "head": "a"}
        result = interop.load(
            self.like, self.source, framework="torch", names=names, allow_unused="m.*"
        )
        np.testing.assert_array_equal(result["head"]["kernel"], self.source["a.weight"].T)
        np.testing.assert_array_equal(result["enc"]["Dense_0"]["kernel"], ones(3, 3))

    def test_one_array_in_two_places(self):
        """As where an embedding is the last layer, too."""
        like = {"embed": {"embedding": ones(5, 3)}, "head": dense(3, 5)}
        source = state(wte__weight=(5, 3))
        result = interop.load(
            like, source, framework="torch", names={"embed": "wte", "head": "wte"}
        )
        np.testing.assert_array_equal(result["embed"]["embedding"], source["wte.weight"])
        np.testing.assert_array_equal(result["head"]["kernel"], source["wte.weight"].T)

    def test_parameters_by_themselves(self):
        like = {"cls": ones(1, 1, 4), "block": {"gamma": ones(4), "fc": dense(4, 4)}}
        source = state(block__fc__weight=(4, 4), block__gamma=(4,), token=(1, 1, 4))
        assert found(like, source, names={"cls": "token"}) == {
            "cls": ("token", "names"),
            "block/gamma": ("block.gamma", "path"),
            "block/fc/kernel": ("block.fc.weight", "path"),
        }

    @pytest.mark.parametrize(
        ("names", "error", "said"),
        [
            ({"hed": "a"}, ValueError, "paths of the model: got 'hed'. Did you mean 'head'?"),
            ({"head": "m.z"}, ValueError, "layers of the file: got 'm.z' for 'head'. Did you mean"),
            ({"head/kernel": "b.weight"}, ValueError, "arrays of the file: got 'b.weight' for"),
            ({"head": 3}, TypeError, "map paths to paths or None: got 3 for 'head'."),
            ({3: "b"}, TypeError, "map paths to paths or None: got 'b' for 3."),
            (lambda path: 3, TypeError, "map paths to paths or None: got 3 for"),
            (3, TypeError, "a dict or a function from our paths to theirs: got int."),
        ],
    )
    def test_mistakes(self, names, error, said):
        with pytest.raises(error, match=re.escape(said)):
            interop.load(self.like, self.source, framework="torch", names=names)
        if error is TypeError:
            with pytest.raises(error, match=re.escape(said)):
                interop.save(self.like, framework="torch", names=names)


NORM = {"scale": ones(2), "bias": ones(2)}
MISTAKES = {
    "shapes": (
        NORM,
        {"weight": ones(3), "bias": ones(2)},
        {},
        r"scale (2,): weight (3,) gives (3,)",
    ),
    "missing": (NORM, {"weight": ones(2)}, {}, "bias (2,): nothing in the file fits it"),
    "unused": (
        NORM,
        {"weight": ones(2), "bias": ones(2), "running_mean": ones(2)},
        {},
        "running_mean (2,): the model has no parameter for it; running statistics need a place",
    ),
    "rounding": (
        {name: value.astype(jnp.bfloat16) for name, value in NORM.items()},
        {"weight": np.full(2, 1.001, "f"), "bias": ones(2)},
        {},
        "scale: float32 does not go into bfloat16 without rounding; allow_rounding=True rounds",
    ),
    "framework": (
        NORM,
        {},
        {"framework": "pytorch"},
        "framework must be one of 'torch', ",
    ),
    "kinds": (NORM, {"weight": ones(2)}, {"kinds": {"*": "Norm"}}, "got 'Norm' for '*'. Did you"),
    "kinds of nothing": (NORM, {"weight": ones(2)}, {"kinds": {"a": "norm"}}, "got 'a'."),
    "empty": ({}, {"weight": ones(2)}, {}, "like must hold parameters: got 0 leaves"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    like, source, options, said = MISTAKES[case]
    with pytest.raises(ValueError, match=re.escape(said)):
        interop.load(like, source, **({"framework": "torch"} | options))


@pytest.mark.parametrize("like", [None, {"a": 1.0}, jax.ShapeDtypeStruct((2,), np.float32), "x"])
def test_what_is_no_model(like):
    with pytest.raises((TypeError, ValueError), match="like must"):
        interop.load(like, {"weight": ones(2)}, framework="torch")


def test_eight_problems_are_listed():
    like = {f"x{i}": dense(2, i + 1) for i in range(9)}
    with pytest.raises(ValueError, match="got 10 without") as error:
        interop.load(like, state(other=(99,)), framework="torch")
    lines = str(error.value).splitlines()
    assert [line[:4] for line in lines[1:10]] == [f"  x{i}" for i in range(8)] + ["  an"]
    assert lines[9] == "  and 2 more"


def test_what_may_be_left_over():
    source = {"weight": ones(2), "running_mean": ones(2), "running_var": ones(2)}
    load = lambda **allowed: interop.load(NORM, source, framework="torch", **allowed)
    for missing in (True, "bias", ["b*"]):
        for unused in (True, "running_*", ["running_mean", "running_var"]):
            assert load(allow_missing=missing, allow_unused=unused)["bias"] is NORM["bias"]
    with pytest.raises(ValueError, match="bias"):
        load(allow_missing="scale", allow_unused=True)
    with pytest.raises(ValueError, match=r"running_var \(2,\)"):
        load(allow_missing=True, allow_unused="running_mean")


def test_dtypes():
    """Those of the model; a value that has no digits to lose is not rounded."""
    like = {"scale": ones(2, dtype=np.float64), "bias": ones(2, dtype=jnp.bfloat16)}
    half = np.array([1.5, -3], jnp.bfloat16)
    result = interop.load(like, {"weight": half, "bias": half.astype("f")}, framework="torch")
    for name, leaf in like.items():
        assert result[name].dtype == leaf.dtype
    np.testing.assert_array_equal(result["scale"], [1.5, -3])
    rounded = interop.load(
        like,
        {"weight": half, "bias": np.array([1.001, np.nan])},
        framework="torch",
        allow_rounding=True,
    )
    assert rounded["bias"][0] == 1
    assert np.isnan(rounded["bias"][1])
    nan = {"weight": half, "bias": np.array([np.nan, np.inf])}
    assert interop.load(like, nan, framework="torch")["bias"][1] == np.inf


def test_a_convolution_or_a_transposed_one():
    like = {"up": {"kernel": ones(3, 4, 4)}, "ConvTranspose_0": {"kernel": ones(3, 4, 4)}}
    source = state(up__weight=(4, 4, 3), ConvTranspose_0__weight=(4, 4, 3))
    matching = interop.match(like, source, framework="torch")
    assert {entry.ours[0]: entry.layer for entry in matching.entries} == {
        "up/kernel": "Conv",
        "ConvTranspose_0/kernel": "ConvTranspose",
    }
    assert matching.notes == [
        "up would also fit as ConvTranspose, with as many channels in as out: say "
        'kinds={path: "ConvTranspose"} if they are'
    ]
    said = interop.match(like, source, framework="torch", kinds={"up": "ConvTranspose"})
    assert said.notes == []


def test_weights_as_transformers_keeps_them():
    """Its Conv1D is a dense layer whose weight is not transposed."""
    like, source = {"fc": dense(2, 2)}, state(fc__weight=(2, 2))
    result = interop.load(like, source, framework="torch", kinds={"*": "Conv1D"})
    np.testing.assert_array_equal(result["fc"]["kernel"], source["fc.weight"])
