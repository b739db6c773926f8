"""Test modes of jaxnorm.data.Normalizer: ranges, masks, statistics that were given, and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxnorm.data import Normalizer
from jaxnorm.data.formula import OURS, Formula

RANKS = (0.01, 0.99)


def fitted_to(rng, axes=0, **options):
    x = (rng.standard_normal((500, 4)) * [1, 10, 0.1, 1] + [0, 1000, -3, 0]).astype(np.float32)
    return x, Normalizer.fit([x], axes, **options)


# ranges ------------------------------------------------------------------------------------------

ENDS = {
    "min_max": lambda x: (x.min(0), x.max(0)),
    "quantile": lambda x: tuple(np.quantile(x, rank, axis=0) for rank in RANKS),
}
ON = {
    "numpy": lambda function: function,
    "jax": lambda function: lambda x: function(jnp.asarray(x)),
    "jit": jax.jit,
}


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16, np.float64, np.int16])
@pytest.mark.parametrize("mode", ENDS)
def test_ranges_become_minus_1_to_1(mode, dtype, on, rng):
    x, fitted = fitted_to(rng, quantiles=RANKS)
    low, high = ENDS[mode](x.astype(np.float64))
    x = x.astype(dtype)
    y = np.asarray(ON[on](lambda x: fitted.normalize(x, mode=mode))(x)).astype(np.float64)
    exact = 2 * (x.astype(np.float64) - low) / (high - low) - 1
    digits = {np.float16: 5e-4, jnp.bfloat16: 4e-3}.get(dtype, 4e-7)
    np.testing.assert_allclose(y, exact, rtol=digits, atol=digits)


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("mode", ["standard", *ENDS])
def test_denormalize_is_the_inverse(mode, on, rng):
    x, fitted = fitted_to(rng, quantiles=RANKS)
    for options in ({}, {"mask": np.array([True, False, True, True])}):
        both = lambda x, options=options: fitted.denormalize(
            fitted.normalize(x, mode=mode, **options), mode=mode, **options
        )
        back = np.asarray(ON[on](both)(x))
        np.testing.assert_allclose(back, x, rtol=3e-7, atol=3e-7 * abs(x).max(0).max())


@pytest.mark.parametrize("mode", ENDS)
def test_the_ends_are_exact_and_a_constant_is_0(mode):
    x = np.array([[1e6, 5.0], [1e6 + 1, 5.0]])
    fitted = Normalizer.fit([x], quantiles=(0.0, 1.0))
    y = fitted.normalize(x, mode=mode)
    np.testing.assert_array_equal(y, [[-1, 0], [1, 0]])
    np.testing.assert_array_equal(fitted.denormalize(y, mode=mode), x)
    inside = fitted.normalize(x.astype(np.float32), mode=mode)
    np.testing.assert_array_equal(inside, [[-1, 0], [1, 0]])


def test_clip_and_floor_of_ranges(rng):
    x, fitted = fitted_to(rng, quantiles=RANKS)
    y = fitted.normalize(x, mode="quantile", clip=1.0)
    assert (y.min(), y.max()) == (-1, 1)
    assert (abs(fitted.normalize(x, mode="quantile")) > 1).any()
    y = fitted.normalize(x, mode="min_max", floor=1e3)
    middle = (x.max(0).astype(float) + x.min(0)) / 2
    np.testing.assert_allclose(y, (x - middle) / 500, atol=1e-6)


def test_modes_by_leaf(rng):
    x = rng.random((50, 2))
    fitted = Normalizer.fit([{"robot": {"state": x, "action": x}, "image": x}], quantiles=RANKS)
    batch = {"robot": {"state": x, "action": x}, "image": x}
    y = fitted.normalize(batch, mode={"robot": "quantile", "robot/action": "min_max"})
    np.testing.assert_array_equal(y["robot"]["action"].min(0), [-1, -1])
    np.testing.assert_array_equal(
        y["robot"]["state"], fitted.normalize(batch, mode="quantile")["robot"]["state"]
    )
    np.testing.assert_array_equal(y["image"], fitted.normalize(batch)["image"])


def test_other_ranks(rng):
    x, fitted = fitted_to(rng, quantiles=(0.5,))
    y = fitted.normalize(x, mode="quantile", ranks=(0.1, 0.9)).astype(np.float64)
    low, high = np.quantile(x.astype(np.float64), [0.1, 0.9], axis=0)
    np.testing.assert_allclose(y, 2 * (x - low) / (high - low) - 1, atol=4e-6)


# masks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ON)
@pytest.mark.parametrize("mode", ["standard", *ENDS])
def test_features_that_are_left_alone_keep_their_bits(mode, on, rng):
    x, fitted = fitted_to(rng, quantiles=RANKS)
    x[:, 1] = 1e7 + np.arange(500)
    mask = np.array([True, False, True, True])
    options = {"mode": mode, "mask": mask, "clip": 0.5}
    y = np.asarray(ON[on](lambda x: fitted.normalize(x, **options))(x))
    np.testing.assert_array_equal(y[:, 1], x[:, 1])
    assert abs(y[:, mask]).max() == 0.5
    del options["clip"]
    back = np.asarray(ON[on](lambda y: fitted.denormalize(y, **options))(y))
    np.testing.assert_array_equal(back[:, 1], x[:, 1])


# statistics that were given ----------------------------------------------------------------------


def test_given_statistics_are_those_of_a_fit(rng):
    x, fitted = fitted_to(rng, quantiles=RANKS)
    moments = fitted.moments
    known = {
        "mean": moments.mean,
        "count": moments.count,
        "min": fitted.min,
        "max": fitted.max,
        "quantiles": fitted.quantiles,
    }
    for spread in ({"var": moments.var}, {"std": fitted.std}):
        given = Normalizer.from_statistics(**known, **spread)
        for mode in ("standard", *ENDS):
            np.testing.assert_allclose(
                given.normalize(x, mode=mode), fitted.normalize(x, mode=mode), rtol=1e-6, atol=1e-7
            )
        assert given.quantiles.keys() == fitted.quantiles.keys()


def test_given_statistics_can_be_merged_and_fitted_further(rng):
    x, fitted = fitted_to(rng)
    moments = fitted.moments
    columns = {"mean": moments.mean[0], "var": moments.var[0], "count": 500}
    given = Normalizer.from_statistics(**columns, min=fitted.min[0], max=fitted.max[0])
    both = Normalizer.fit([x, x + 1])
    for found in (given.merge(Normalizer.fit([x + 1])), given.extend([x + 1])):
        np.testing.assert_allclose(found.moments.var, both.moments.var, rtol=1e-12)
        np.testing.assert_array_equal(found.moments.count, both.moments.count)
        np.testing.assert_array_equal(found.max, both.max)


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_given_statistics_are_saved(suffix, rng, tmp_path):
    given = Normalizer.from_statistics(
        mean={"a": np.ones(3), "b": {"c": np.zeros(2)}},
        std={"a": np.ones(3) / 3, "b": {"c": np.ones(2)}},
        quantiles={0.01: {"a": -np.ones(3), "b": {"c": np.ones(2)}}},
        mask={"a": np.array([True, True, False]), "b": {"c": np.array([True, True])}},
    )
    given.formula = Formula(added=1e-6, clip=5.0)
    given.save(tmp_path / f"stats.{suffix}")
    loaded = Normalizer.load(tmp_path / f"stats.{suffix}")
    assert loaded.formula == given.formula
    for path, leaf in given._state.leaves.items():
        other = loaded._state.leaves[path]
        assert other.unknown == leaf.unknown == {"count", "min", "max"}
        np.testing.assert_array_equal(other.mask, leaf.mask)
        np.testing.assert_array_equal(other.given[0.01], leaf.given[0.01])
        np.testing.assert_array_equal(other.summary.moments.var, leaf.summary.moments.var)
    x = {"a": rng.random(3), "b": {"c": rng.random(2)}}
    np.testing.assert_array_equal(loaded.normalize(x)["a"], given.normalize(x)["a"])


def test_masks_may_be_lists():
    tree = {"a": X, "b": {"c": X, "d": X}}
    fitted, features = Normalizer.fit([tree]), [True, *[False] * (X.shape[1] - 1)]
    array = np.array(features)
    expected = fitted.normalize(tree, mask={"a": array, "b": {"c": array}})
    for mask in ({"a": features, "b": {"c": features}}, {"a": features, "b/c": tuple(features)}):
        jax.tree.map(np.testing.assert_array_equal, fitted.normalize(tree, mask=mask), expected)


def test_images_with_features_first():
    given = Normalizer.from_statistics(mean=np.ones((3, 1, 1)), std=np.full((3, 1, 1), 2.0))
    for shape in ((3, 4, 5), (7, 3, 4, 5), (2, 7, 3, 4, 5)):
        assert (given.normalize(np.full(shape, 5.0)) == 2).all()


def test_patterns_have_their_axes():
    given = Normalizer.from_statistics(
        mean=np.zeros((1, 1, 1, 3)), std=np.full((1, 1, 1, 3), 2.0), axes="[n h w] c"
    )
    assert (given.normalize(np.full((2, 4, 4, 3), 4.0)) == 2).all()


# padding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["standard", *ENDS])
def test_padded_features_stay_as_they_are(mode, rng):
    x, fitted = fitted_to(rng, quantiles=RANKS)
    padded, wide = fitted.pad(6), np.concatenate([x, np.full((500, 2), 7, x.dtype)], 1)
    y = padded.normalize(wide, mode=mode)
    np.testing.assert_array_equal(y[:, :4], fitted.normalize(x, mode=mode))
    np.testing.assert_array_equal(y[:, 4:], wide[:, 4:])
    np.testing.assert_array_equal(padded.denormalize(y, mode=mode)[:, 4:], wide[:, 4:])
    assert padded.std[0, 4:].tolist() == [1, 1]
    assert padded.quantiles[0.99][0, 4:].tolist() == [0.98, 0.98]


# formulas ----------------------------------------------------------------------------------------


def test_formulas():
    x = np.array([[2.0, 5.0, 5.0]])
    mean, var = np.array([1.0, 5.0, 5.0]), np.array([4.0, 0.0, 1e-29])
    ends = {"min": np.array([0.0, 5.0, 5.0]), "max": np.array([4.0, 5.0, 5.0])}
    given = Normalizer.from_statistics(mean=mean, var=var, count=10, **ends)
    shifted = x + np.array([[0, 1.0, 1.0]])

    def standard(**formula):
        given.formula = Formula(**formula)
        return given.normalize(shifted).ravel()

    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(standard(added=0.5)[0], 1 / 2.5)
        np.testing.assert_allclose(standard(inside=5.0)[0], 1 / 3)
        np.testing.assert_allclose(standard(least=0.1), [0.5, 10, 10])
        np.testing.assert_allclose(standard(most=0.5, least=0.1)[0], 2)
        np.testing.assert_allclose(standard(unit=True), [0.5, 1, 1])
        np.testing.assert_allclose(standard(least=0.1, clip=3.0), [0.5, 3, 3])

    def ranged(**formula):
        given.formula = Formula(**formula)
        return given.normalize(x, mode="min_max").ravel()

    np.testing.assert_allclose(ranged(range_added=1e-3), [4 / 4.001 - 1, -1, -1])
    np.testing.assert_allclose(ranged(range_zero=1e-8), [0, -1, -1])
    np.testing.assert_allclose(ranged(range_least=0.1, constant_is_zero=True), [0, 0, 0])


# mistakes ----------------------------------------------------------------------------------------

X = np.arange(6.0).reshape(3, 2)
GIVEN = Normalizer.from_statistics(mean={"a": np.zeros(2)}, std={"a": np.ones(2)})
FITTED = Normalizer.fit([{"a": X}])
MISTAKES = {
    "mode must be one of 'standard', 'min_max', 'quantile': got 'minmax'.": lambda: (
        FITTED.normalize({"a": X}, mode="minmax")
    ),
    "leaf 'a': mode 'quantile' needs two quantiles: fewer are known. Fit with": lambda: (
        FITTED.normalize({"a": X}, mode="quantile")
    ),
    "mode 'quantile' needs two quantiles: fewer": lambda: Normalizer.fit(
        [X], quantiles=(0.5,)
    ).normalize(X, mode="quantile"),
    "the quantile of rank 0.1 must be known: none is.": lambda: FITTED.normalize(
        {"a": X}, mode="quantile", ranks=(0.1, 0.9)
    ),
    "leaf 'a': mode 'min_max' needs min and max: these statistics came without min": lambda: (
        GIVEN.normalize({"a": X}, mode="min_max")
    ),
    "merging needs count, mean, variance, minimum and maximum of both: one lacks count, ": (
        lambda: GIVEN.merge(GIVEN)
    ),
    "mask must hold booleans, False for features that stay as they are: got int64.": lambda: (
        FITTED.normalize({"a": X}, mask=np.array([0, 1]))
    ),
    "mask must broadcast to the statistics: it has shape (3,), they have (1, 2).": lambda: (
        FITTED.normalize({"a": X}, mask=np.ones(3, bool))
    ),
    "ranks must be two, the lower one first: got (0.9, 0.1).": lambda: FITTED.normalize(
        {"a": X}, mode="quantile", ranks=(0.9, 0.1)
    ),
    "var must be >= 0: got -1.0.": lambda: Normalizer.from_statistics(mean=X, var=-np.ones((3, 2))),
    "a minimum must not be above its maximum: got 1.0, 0.0.": lambda: Normalizer.from_statistics(
        min=np.ones(2), max=np.zeros(2)
    ),
    "all statistics must have the same leaves: std differs in 'a', 'b'.": lambda: (
        Normalizer.from_statistics(mean={"a": X}, std={"b": X})
    ),
    "the size to pad to must be an integer of at least 2, the features there are: got 1.": (
        lambda: FITTED.pad(1)
    ),
    "sizes must name leaves that are fitted: got ['b'], fitted are ['a'].": lambda: FITTED.pad(
        {"b": 3}
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below
        MISTAKES[message]()
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"mean": X}, {"mean": X, "std": X, "var": X}, {"count": 3}])
def test_a_mean_needs_one_deviation(given):
    with pytest.raises(TypeError, match="from_statistics needs"):
        Normalizer.from_statistics(**given)


# found by an attack ------------------------------------------------------------------------------


def test_a_feature_without_elements_stays_as_it_is_in_every_mode():
    x, where = np.random.default_rng(0).random((50, 2)), np.array([[True, False]])
    fitted = Normalizer(quantiles=RANKS).update(x, where=where)
    for mode in ("standard", *ENDS):
        assert fitted.normalize(np.array([[0.5, 7.0]]), mode=mode)[0, 1] == 7
        assert fitted.denormalize(np.array([[0.5, 7.0]]), mode=mode)[0, 1] == 7


def test_merging_keeps_the_formula_and_the_ranks():
    fitted = Normalizer.fit([X], quantiles=RANKS)
    fitted.formula = Formula(added=0.5)
    for merged in (Normalizer().merge(fitted), fitted.merge(Normalizer())):
        assert (merged.formula, merged.ranks) == (fitted.formula, RANKS)
    other = Normalizer.fit([X], quantiles=RANKS)
    for pair in ((fitted, other), (other, fitted)):
        with pytest.raises(ValueError, match="must divide in the same way"):
            pair[0].merge(pair[1])


def test_masks_that_differ_and_padded_features_are_not_merged():
    known = {"mean": np.zeros(2), "std": np.ones(2), "count": 3, "min": -np.ones(2)}
    known |= {"max": np.ones(2)}
    masked = Normalizer.from_statistics(**known, mask=np.array([True, False]))
    plain = Normalizer.from_statistics(**known)
    for pair in ((masked, plain), (plain, masked)):
        with pytest.raises(ValueError, match="their masks differ"):
            pair[0].merge(pair[1])
    padded = plain.pad(np.int64(3))
    with pytest.raises(ValueError, match="features that were padded have no data"):
        padded.merge(padded)
    with pytest.raises(ValueError, match="features that were padded have no data"):
        padded.update(np.ones((4, 3)))


def test_a_floor_holds_for_constants_of_other_formulas():
    given = Normalizer.from_statistics(min=np.array([2.0]), max=np.array([2.0]))
    given.formula = Formula(range_zero=1e-8)
    assert given.normalize(np.array([2.5]), mode="min_max", floor=1.0).item() == 0


def test_lists_of_numbers_are_arrays():
    given = Normalizer.from_statistics(mean=[0.5, 0.25], std=[1.0, 2.0])
    assert given.normalize(np.array([1.5, 2.25])).tolist() == [1, 1]


GIVEN_MISTAKES = {
    "the pattern must name every axis: it names 2, the array has rank 1.": {"axes": "[n] c"},
    "reduced axes must have size 1: the statistics have shape (2, 3), over 1 it must be (2, 1)": {
        "axes": 1,
        "mean": np.zeros((2, 3)),
        "std": np.ones((2, 3)),
    },
    "all statistics must have one shape, or be one number: got mean (3,), std (2,)": {
        "std": np.ones(2)
    },
    "std must be >= 0: got -1.0.": {"std": -np.ones(3)},
    "count must be finite: got nan.": {"count": np.nan},
    "mean must hold real numbers: got complex128.": {"mean": np.ones(3) * 1j},
    "a quantile must not be above that of a higher rank": {
        "quantiles": {0.01: np.ones(3), 0.99: np.zeros(3)}
    },
}


@pytest.mark.parametrize("message", GIVEN_MISTAKES)
def test_given_mistakes(message):
    known = {"mean": np.zeros(3), "std": np.ones(3)} | GIVEN_MISTAKES[message]
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below
        Normalizer.from_statistics(**known)
    assert message in str(caught.value)


@pytest.mark.parametrize("axes", ["[n] c [h w]", (0, 1, 2, 3)])
def test_padding_needs_features_along_the_last_axis(axes):
    fitted = Normalizer.fit([np.ones((2, 3, 4, 4))], axes)
    with pytest.raises(ValueError, match="the last axis must hold features"):
        fitted.pad(4)


def test_a_state_of_other_data_is_refused(tmp_path):
    state = tmp_path / "state.json"
    Normalizer.fit([X], state=state)
    for other in (np.ones((3, 7)), {"a": X}):
        with pytest.raises(ValueError, match=r"(must be of these batches|the same leaves)"):
            Normalizer.fit([other], state=state)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"added": 0.5', '"added": "x"'),
        ('"added": 0.5', '"added": null'),
        ('"batches": 1', '"batches": null'),
        ('"": 0', '"b": 0'),
    ],
)
def test_files_that_were_changed_by_hand_are_refused(old, new, tmp_path):
    path, fitted = tmp_path / "stats.json", Normalizer.fit([X])
    fitted.formula = Formula(added=0.5)
    fitted.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=r"stats.json must be a Normalizer's file"):
        Normalizer.load(path)


# wide ranges -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "most", "on"),
    [(np.float64, 1.7e308, "numpy"), *((np.float32, 3.4e38, on) for on in ON)],
)
@pytest.mark.parametrize("mode", ["min_max", "quantile"])
def test_a_range_wider_than_the_largest_number(dtype, most, on, mode):
    low, high = np.array([-most, -most, most / 2]), np.array([most, most / 2, most])
    known = {"min": low, "max": high, "quantiles": {0.01: low, 0.99: high}}
    stats = Normalizer.from_statistics(**known)
    x = np.array([low, low / 2 + high / 2, high], dtype)
    y = ON[on](lambda x: stats.normalize(x, mode=mode))(x)
    np.testing.assert_allclose(y, np.outer([-1, 0, 1], [1, 1, 1]), atol=4 * np.finfo(dtype).eps)
    restored = ON[on](lambda y: stats.denormalize(y, mode=mode))(y)
    np.testing.assert_allclose(restored, x, rtol=8 * np.finfo(dtype).eps, atol=most * 1e-7)


@pytest.mark.parametrize(
    "formula",
    [OURS, Formula(range_added=1e-8), Formula(range_zero=1e-8), Formula(range_added=1e-6)],
    ids=["ours", "octo", "lerobot", "openpi"],
)
def test_widths_keep_every_bit(formula, rng):
    low = rng.standard_normal(10_000) * 10.0 ** rng.integers(-30, 30, 10_000)
    high = low + np.abs(rng.standard_normal(10_000)) * 10.0 ** rng.integers(-30, 30, 10_000)
    width = np.maximum(high - low + formula.range_added, formula.range_least)
    if formula.range_zero is not None:
        width = np.where(high == low, formula.range_zero, width)
    assert np.array_equal(formula.ranged(low, high)[2], width / 2)
