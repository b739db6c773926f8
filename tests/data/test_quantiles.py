"""Test quantiles of jaxnorm.data.Normalizer: their rank, merges, resumes, and mistakes."""

import pickle

import ml_dtypes
import numpy as np
import pytest

from jaxnorm.arguments.axes import resolve
from jaxnorm.data import Normalizer
from jaxnorm.data.host import levels
from jaxnorm.data.host.sketch import Sketch

RANKS = (0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
ERROR = 1e-3  # what the class promises


def ordered(rng, count, order):
    x = rng.standard_normal(count)
    if order == "sorted":
        return np.sort(x)
    if order == "reversed":
        return np.sort(x)[::-1]
    if order == "drifting":
        return x + np.linspace(0, 1000, count)
    if order == "zigzag":
        x = np.sort(x)
        return np.stack([x[: count // 2], x[count // 2 :][::-1]], 1).ravel()
    if order == "lognormal":
        return np.exp(5 * x)
    if order == "outliers first":
        x[: count // 100] = 1e30
        return x
    if order == "few values":
        return np.rint(x)
    return x


def rank_errors(fitted, x):
    """The distance of the ranks that a value has in the data from the rank it stands for."""
    x = np.sort(x.astype(np.float64), axis=0)
    errors = []
    for rank in RANKS:
        for column, value in enumerate(np.ravel(fitted.quantile(rank))):
            low, high = (
                np.searchsorted(x[:, column], value, side) / len(x) for side in ("left", "right")
            )
            errors.append(max(low - rank, rank - high, 0))
    return max(errors)


ORDERS = (
    *("random", "sorted", "reversed", "drifting", "zigzag"),
    *("lognormal", "outliers first", "few values"),
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ORDERS)
def test_ranks_are_right_in_any_order(order, dtype, rng):
    x = ordered(rng, 300_000, order).astype(dtype)[:, None]
    batches = np.split(x, np.cumsum(rng.integers(1, 9000, 60)))
    fitted = Normalizer.fit([b for b in batches if len(b)], quantiles=RANKS)
    assert rank_errors(fitted, x) <= ERROR


@pytest.mark.slow
@pytest.mark.parametrize("order", ["random", "drifting", "sorted"])
def test_ranks_are_right_among_many_elements(order, rng):
    x = ordered(rng, 10_000_000, order).astype(np.float32)[:, None]
    fitted = Normalizer.fit(np.array_split(x, 400), quantiles=RANKS)
    assert rank_errors(fitted, x) <= ERROR


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.float16])
def test_few_elements_are_exact(dtype, rng):
    x = (rng.standard_normal((1500, 3)) * 50 + 100).astype(dtype)
    fitted = Normalizer.fit(np.array_split(x, 7), quantiles=RANKS)
    for rank in (0, *RANKS, 1):
        exact = np.quantile(x.astype(np.float64), rank, axis=0, keepdims=True)
        np.testing.assert_allclose(fitted.quantile(rank), exact, rtol=1e-13)


def test_bfloat16_and_booleans(rng):
    x = rng.standard_normal((500, 2)).astype(ml_dtypes.bfloat16)
    batch = {"x": x, "b": x > 0}
    fitted = Normalizer.fit([batch], quantiles=(0.5,)).quantiles[0.5]
    for leaf in batch:
        exact = np.quantile(batch[leaf].astype(np.float64), 0.5, axis=0, keepdims=True)
        np.testing.assert_array_equal(fitted[leaf], exact)


@pytest.mark.parametrize(
    "axes", ["[n h w] c", "n [h w] c", "[n] h w c", "[n h] (g [w]) c", "[n h w c]", "n h w [c]"]
)
def test_axes(axes, rng):
    x = rng.standard_normal((6, 4, 8, 3)).astype(np.float32)
    sizes = {"g": 2} if "g" in axes else {}
    fitted = Normalizer.fit([x], axes, quantiles=(0.3,), **sizes)
    reduction = resolve(axes, x.shape, sizes)
    split = x.astype(np.float64).reshape(reduction.split_shape)
    exact = np.quantile(split, 0.3, axis=reduction.axes).reshape(reduction.stats_shape)
    np.testing.assert_allclose(fitted.quantile(0.3), exact, rtol=1e-13)


def test_many_features_and_large_batches_are_cut(rng):
    """More groups than one thread takes, more elements than are sorted at once."""
    x = rng.standard_normal((70_000, 40)).astype(np.float32)
    fitted = Normalizer.fit([x], quantiles=RANKS)
    assert rank_errors(fitted, x) <= ERROR
    wide = rng.standard_normal((2, 3, 90_000, 2)).astype(np.float32)
    fitted = Normalizer.fit([wide], "[n] g [t] c", quantiles=RANKS)
    columns = wide.transpose(0, 2, 1, 3).reshape(-1, 6)
    assert rank_errors(fitted, columns) <= ERROR


# masks -------------------------------------------------------------------------------------------


def test_masked_elements_do_not_count(rng):
    x = rng.standard_normal((900, 5)).astype(np.float32)
    mask = rng.random(x.shape) < np.linspace(0.1, 1, 5)
    mask[:, 2] = False
    fitted = Normalizer(quantiles=(0.5,))
    for rows in np.array_split(np.arange(900), 4):
        fitted.update(np.where(mask, x, np.nan)[rows], where=mask[rows])
    found = fitted.quantile(0.5)[0]
    for column in (0, 1, 3, 4):
        exact = np.quantile(x[mask[:, column], column].astype(np.float64), 0.5)
        assert found[column] == pytest.approx(exact, rel=1e-13)
    assert np.isnan(found[2])


def test_float_masks_of_0_and_1_are_masks_and_weights_are_refused(rng):
    x, fitted = rng.standard_normal((9, 1)), Normalizer(quantiles=(0.5,))
    fitted.update(x, where=np.array([1.0, 0.0] * 4 + [1.0])[:, None])
    assert fitted.quantile(0.5).item() == np.median(x[::2])
    with pytest.raises(ValueError, match=r"quantiles need a mask.*: got weights other than 0 and"):
        fitted.update(x, where=np.full((9, 1), 0.5))
    assert fitted.batches == 1


def test_nan_is_seen_and_infinities_have_ranks():
    x = np.array([[np.nan, -np.inf], [1.0, 2.0], [2.0, 3.0], [3.0, np.inf]])
    fitted = Normalizer.fit([x], quantiles=(0.5,))
    assert np.isnan(fitted.quantile(0.5)[0, 0])
    assert fitted.quantile(0.5)[0, 1] == 2.5
    assert [fitted.quantile(rank)[0, 1] for rank in (0, 1)] == [-np.inf, np.inf]


def test_nan_among_many_elements_is_seen(rng):
    x = rng.standard_normal((100_000, 2)).astype(np.float32)
    x[77, 1] = np.nan
    fitted = Normalizer.fit(np.array_split(x, 9), quantiles=RANKS)
    assert np.isfinite(fitted.quantile(0.5)[0, 0])
    assert np.isnan(fitted.quantile(0.5)[0, 1])


# merging, resuming, saving -----------------------------------------------------------------------


def parts_of(fitted):
    return {path: leaf.sketch.arrays() for path, leaf in fitted._state.leaves.items()}


def assert_same(a, b):
    a, b = parts_of(a), parts_of(b)
    for path in a:
        for name in a[path]:
            np.testing.assert_array_equal(a[path][name], b[path][name])
            assert a[path][name].dtype == b[path][name].dtype


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_saved_and_resumed_to_the_bit(suffix, rng, tmp_path):
    x = rng.standard_normal((60_000, 3)).astype(np.float32)
    batches = [{"a": part, "b": part[:, :1].astype(np.float64)} for part in np.array_split(x, 23)]
    whole = Normalizer.fit(batches, quantiles=RANKS)
    state = tmp_path / f"state.{suffix}"

    def broken():
        yield from batches[:13]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Normalizer.fit(broken(), state=state, quantiles=RANKS)
    resumed = Normalizer.fit(batches, state=state, quantiles=RANKS)
    assert_same(resumed, whole)
    assert_same(Normalizer.load(state), whole)
    assert Normalizer.load(state).ranks == RANKS
    assert_same(pickle.loads(pickle.dumps(whole)), whole)


def test_the_same_data_give_the_same_bits_on_any_number_of_threads(rng):
    x = rng.standard_normal((70_000, 40)).astype(np.float32)
    one, many = (
        Normalizer(quantiles=RANKS).update(x, threads=threads).update(x[:99], threads=threads)
        for threads in (1, 5)
    )
    assert_same(one, many)


def test_merged_in_any_order(rng):
    x = ordered(rng, 200_000, "drifting").astype(np.float32)[:, None]
    parts = [Normalizer.fit([part], quantiles=RANKS) for part in np.array_split(x, 31)]
    rng.shuffle(parts)
    merged = parts[0]
    for part in parts[1:]:
        merged = merged.merge(part)
    assert rank_errors(merged, x) <= ERROR
    empty = merged.without_data()
    assert_same(empty.merge(merged), merged)
    assert_same(merged.merge(empty), merged)


def test_merging_floats_of_two_widths(rng):
    x = rng.standard_normal((50_000, 2))
    merged = Normalizer.fit([x[:20_000].astype(np.float32)], quantiles=RANKS)
    merged.update(x[20_000:])
    assert rank_errors(merged, x) <= ERROR


def test_size_of_a_feature(rng):
    for dtype in (np.float32, np.float64):
        fitted = Normalizer(quantiles=(0.5,))
        for _ in range(40):
            fitted.update(rng.standard_normal((20_000, 2)).astype(dtype))
        sketch = fitted._state.leaves[""].sketch
        kept = sum(
            block.nbytes for _, groups in sketch.parts for level in groups.blocks for block in level
        )
        assert kept / 2 <= 40 << 10


def test_halving_takes_either_half_as_often(rng):
    for level in range(12):
        taken = levels._second(rng.standard_normal((400, 64)).astype(np.float32), level)
        assert 160 < taken.sum() < 240


def test_parts_have_choices_of_their_own(rng):
    """Many small parts of float64, each of which is halved once, merged one after the other."""
    x = rng.standard_normal((200 * 1650, 30))
    merged = Normalizer(quantiles=RANKS)
    for part in np.array_split(x, 200):
        merged = merged.merge(Normalizer.fit([part], quantiles=RANKS))
    assert rank_errors(merged, x) <= ERROR


def test_groups_of_two_dtypes_resume_to_the_bit(rng, tmp_path):
    batches = [
        rng.standard_normal((3000, 2)).astype((np.float32, np.float64)[i % 2]) for i in range(9)
    ]
    masks = [np.array([[i % 2 == 0, True]]) for i in range(9)]
    whole = Normalizer(quantiles=RANKS)
    for batch, mask in zip(batches, masks, strict=True):
        whole.update(batch, where=mask)
    resumed = Normalizer(quantiles=RANKS)
    for batch, mask in zip(batches, masks, strict=True):
        resumed.update(batch, where=mask)
        resumed.save(tmp_path / "state.json")
        resumed = Normalizer.load(tmp_path / "state.json")
    assert_same(resumed, whole)


def test_no_features():
    fitted = Normalizer.fit([np.zeros((5, 0))], quantiles=(0.1,))
    assert fitted.quantile(0.1).shape == (1, 0)


def test_ranks_in_float32_are_meant_by_their_digits():
    assert Normalizer(quantiles=np.float32([0.01, 0.99])).ranks == (0.01, 0.99)


def test_the_weights_of_all_elements_sum_to_their_number(rng):
    x = rng.standard_normal((123_457, 1)).astype(np.float32)
    fitted = Normalizer.fit(np.array_split(x, 19), quantiles=(0.5,))
    ((_, kept),) = fitted._state.leaves[""].sketch.parts
    assert kept.weighted()[1].sum() == len(x)


# mistakes ----------------------------------------------------------------------------------------

X = np.arange(6.0).reshape(3, 2)
MISTAKES = {
    "quantiles must be ranks from 0 to 1, such as 0.01: got 99.": lambda: Normalizer(
        quantiles=(0.5, 99)
    ),
    "quantiles must be ranks from 0 to 1, such as 0.01: got nan.": lambda: Normalizer(
        quantiles=np.nan
    ),
    "quantiles must be ranks from 0 to 1, such as 0.01: got True.": lambda: Normalizer(
        quantiles=[True]
    ),
    "leaf 'a': the quantile of rank 0.5 must be known: none is. Fit with quantiles=": lambda: (
        Normalizer.fit([{"a": X}]).quantile(0.5)
    ),
    "both must have been fitted with quantiles, or neither: one was.": lambda: Normalizer.fit(
        [X]
    ).merge(Normalizer.fit([X], quantiles=(0.5,))),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # compared below
        MISTAKES[message]()
    assert message in str(caught.value)


def test_a_state_without_quantiles_is_not_gone_on_with(tmp_path):
    state = tmp_path / "state.json"
    Normalizer.fit([X], state=state)
    with pytest.raises(ValueError, match="must have been fitted with quantiles, too"):
        Normalizer.fit([X, X], state=state, quantiles=(0.5,))


def test_damaged_samples_are_refused(tmp_path):
    path = tmp_path / "stats.json"
    fitted = Normalizer.fit([X], quantiles=(0.5,))
    fitted.save(path)
    path.write_text(path.read_text().replace('"quantiles/lengths"', '"quantiles/length"'))
    with pytest.raises(ValueError, match=r"must be a Normalizer's file"):
        Normalizer.load(path)
    arrays = fitted._state.leaves[""].sketch.arrays()
    with pytest.raises(ValueError, match="as many values as lengths say"):
        Sketch.of_arrays((1, 2), arrays | {"values": arrays["values"][:-1]})
