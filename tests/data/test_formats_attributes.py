"""Test statistics of live objects: scikit-learn, Keras, Gymnasium and Stable-Baselines3."""

import importlib
import json
import pickle
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from jaxnorm.data import Normalizer, formats
from jaxnorm.data.formats import FormatError, Statistics, attributes, sklearn


@pytest.fixture
def data(rng):
    """The second feature is constant, and the third far from 0."""
    return rng.standard_normal((50, 3)) * [1, 0, 5] + [0, 1 / 3, 1e3]


def library(name):
    # the packages say what else they would import
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def normalized(contents, x, leaf=""):
    found, formula = contents.leaves[leaf], contents.formula
    count = np.ones(()) if found.count is None else found.count
    y = (x - found.mean) / formula.standard(count, found.mean, found.var)
    return np.clip(y, -formula.clip, formula.clip)


@pytest.mark.parametrize(("with_mean", "with_std"), [(1, 1), (0, 1), (1, 0)])
def test_scikit_learn_scales_like_this(data, with_mean, with_std):
    preprocessing = library("sklearn.preprocessing")
    scaler = preprocessing.StandardScaler(with_mean=bool(with_mean), with_std=bool(with_std))
    scaler.fit(data[:20])
    scaler.partial_fit(data[20:])
    read = attributes.contents(scaler)
    np.testing.assert_allclose(normalized(read, data), scaler.transform(data), rtol=1e-12)
    np.testing.assert_array_equal(read.leaves[""].count, [50, 50, 50])
    assert len(read.notes) == 2 - with_mean - with_std


def test_a_scaler_that_does_nothing_is_refused(data):
    preprocessing = library("sklearn.preprocessing")
    scaler = preprocessing.StandardScaler(with_mean=False, with_std=False).fit(data)
    with pytest.raises(FormatError, match="StandardScaler must have a mean or a deviation"):
        attributes.contents(scaler)
    with pytest.raises(FormatError, match="StandardScaler must have mean_, var_ and n_samples"):
        attributes.contents(preprocessing.StandardScaler())


def test_scikit_learn_counts_what_is_not_missing(data):
    preprocessing = library("sklearn.preprocessing")
    data[:7, 2] = np.nan
    read = attributes.contents(preprocessing.StandardScaler().fit(data)).leaves[""]
    np.testing.assert_array_equal(read.count, [50, 50, 43])


@pytest.mark.parametrize("axis", [-1, (1, 2), None])
def test_keras_divides_by_the_epsilon_at_least(data, axis):
    keras = library("keras")
    layer = keras.layers.Normalization(axis=axis)
    x = (np.float32(data) - np.float32([0, 0, 1e3])).reshape(10, 5, 3)
    layer.adapt(x)
    read = attributes.contents(layer)
    assert read.leaves[""].mean.shape == {-1: (3,), (1, 2): (5, 3), None: (1,)}[axis]
    # the constant feature's deviation is float32's rounding, which divides that of the difference
    columns = slice(None) if axis is None else [0, 2]
    np.testing.assert_allclose(
        normalized(read, x)[..., columns], np.asarray(layer(x))[..., columns], rtol=2e-5, atol=2e-5
    )
    given = keras.layers.Normalization(mean=[1.0, 2.0], variance=[4.0, 0.0])
    given.build((None, 2))
    x = np.float32([[3.0, 2 + 1e-6]])
    np.testing.assert_allclose(
        normalized(attributes.contents(given), x), np.asarray(given(x)), rtol=1e-6
    )


def running(data, count=attributes.PRIOR):
    """What RunningMeanStd holds after two batches, by its own merge."""
    mean, var = np.zeros(data.shape[1]), np.ones(data.shape[1])
    for batch in (data[:20], data[20:]):
        n, total = len(batch), count + len(batch)
        delta = batch.mean(0) - mean
        m2 = var * count + batch.var(0) * n + delta**2 * count * n / total
        mean, var, count = mean + delta * n / total, m2 / total, total
    return {"mean": mean, "var": var, "count": count}


def test_the_prior_is_taken_out_exactly(data):
    held = running(data)
    with_it = attributes.contents(held)
    np.testing.assert_array_equal(with_it.leaves[""].var, held["var"])
    assert with_it.notes == (attributes.PRIOR_NOTE,)
    # the constant feature's variance is not 0 with the prior
    assert held["var"][1] > 1e-6
    read = attributes.contents(held, without_prior=True)
    leaf = read.leaves[""]
    np.testing.assert_array_equal(leaf.count, [50, 50, 50])
    np.testing.assert_allclose(leaf.mean, data.mean(0), rtol=1e-14)
    np.testing.assert_allclose(leaf.var, data.var(0), rtol=1e-11, atol=1e-15)
    assert read.notes == ()


def test_the_prior_alone_leaves_nothing():
    held = {"mean": np.zeros(2), "var": np.ones(2), "count": 1e-4}
    leaf = attributes.contents(held, without_prior=True).leaves[""]
    np.testing.assert_array_equal([leaf.count, leaf.mean, leaf.var], np.zeros((3, 2)))
    with pytest.raises(FormatError, match=r"a whole count and 1e-4, .*: got .*50\.3"):
        attributes.contents(held | {"count": 50.3}, without_prior=True)
    with pytest.raises(FormatError, match="without_prior must be of a RunningMeanStd"):
        attributes.contents({"mean_": np.ones(2)}, without_prior=True)


@pytest.mark.parametrize(
    "name", ["gymnasium.wrappers.utils", "stable_baselines3.common.running_mean_std"]
)
def test_running_mean_std_is_read(data, name):
    statistics = library(name).RunningMeanStd(shape=(3,))
    statistics.update(data[:20])
    statistics.update(data[20:])
    np.testing.assert_allclose(statistics.var, running(data)["var"], rtol=1e-14)
    read = attributes.contents(statistics, without_prior=True).leaves[""]
    np.testing.assert_allclose(read.var, data.var(0), rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("keys", [False, True])
def test_stable_baselines_normalizes_like_this(data, keys):
    library("stable_baselines3")
    from gymnasium import Env, spaces
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    box = spaces.Box(-np.inf, np.inf, (3,))

    class Room(Env):
        observation_space = spaces.Dict({"state": box, "goal": box}) if keys else box
        action_space = spaces.Discrete(2)

    held = VecNormalize(DummyVecEnv([Room]), clip_obs=1.5, epsilon=1e-4)
    for statistics in held.obs_rms.values() if keys else [held.obs_rms]:
        statistics.update(data)
    read = attributes.contents(held)
    true = held.normalize_obs({"state": data, "goal": data} if keys else data)
    for leaf in read.leaves:
        np.testing.assert_allclose(
            normalized(read, data, leaf), true[leaf] if keys else true, rtol=1e-6, atol=1e-7
        )
    assert set(read.leaves) == ({"state", "goal"} if keys else {""})
    held.norm_obs = False
    with pytest.raises(FormatError, match="VecNormalize must normalize observations"):
        attributes.contents(held)


def test_gymnasium_normalizes_like_this(data):
    gymnasium = library("gymnasium")
    from gymnasium.wrappers import NormalizeObservation, NormalizeReward

    class Room(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        action_space = gymnasium.spaces.Discrete(2)

    held = NormalizeObservation(Room(), epsilon=1e-2)
    for row in data:
        held.observation(row)
    held.update_running_mean = False
    read = attributes.contents(held)
    np.testing.assert_allclose(normalized(read, data[0]), held.observation(data[0]), rtol=1e-5)
    rewards = NormalizeReward(Room())
    rewards.return_rms.update(data[:, 2])
    read = attributes.contents(rewards)
    assert read.leaves[""].mean.tolist() == 0
    assert "Rewards are not centered: the mean is 0." in read.notes


def test_attributes_are_kept_in_archives(tmp_path, data):
    fitted = Normalizer.fit([data])
    path = tmp_path / "scaler.npz"
    fitted.save(path, format="sklearn")
    stored = np.load(path)
    assert stored["n_samples_seen_"] == 50
    assert stored["scale_"][1] == 1
    assert formats.recognize(path) == "sklearn"
    read = formats.read(path, "sklearn").leaves[""]
    np.testing.assert_array_equal(read.var, stored["var_"])
    before = path.read_bytes()
    formats.write(path, {"": read}, "sklearn")
    np.testing.assert_array_equal(np.load(path)["mean_"], stored["mean_"])
    assert len(path.read_bytes()) == len(before)
    scaler = library("sklearn.preprocessing").StandardScaler()
    vars(scaler).update({name: stored[name] for name in stored.files})
    np.testing.assert_allclose(
        scaler.transform(data), Normalizer.load(path).normalize(data), rtol=1e-14
    )
    other = tmp_path / "running.json"
    other.write_text(json.dumps({"mean": [1.0], "var": [4.0], "count": 5.0001}))
    assert formats.recognize(other) == "sklearn"
    assert Normalizer.load(other).std.tolist() == [[2]]


def test_pickles_are_refused_unread(tmp_path):
    for name in ("scaler.pkl", "vec_normalize.pickle", "scaler.joblib"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps(SimpleNamespace(mean_=1)))
        assert formats.recognize(path) == "sklearn"
        with pytest.raises(ValueError, match="must be no pickle, which can run any program"):
            Normalizer.load(path)
    np.savez(tmp_path / "x.npz", mean=np.array([None], object), var=[1.0], count=1)
    with pytest.raises(FormatError, match="must be an archive of arrays of numbers"):
        sklearn.read(tmp_path / "x.npz")
    whole = (tmp_path / "x.npz").read_bytes()
    np.save(tmp_path / "x.npy", np.ones(3))
    for damaged in (b"", b"none", whole[:-30], (tmp_path / "x.npy").read_bytes()):
        (tmp_path / "x.npz").write_bytes(damaged)
        assert formats.recognize(tmp_path / "x.npz") is None
        with pytest.raises(FormatError, match="must be an archive of arrays of numbers"):
            sklearn.read(tmp_path / "x.npz")


def test_what_a_scaler_cannot_say_is_refused(tmp_path):
    ones, wide = [Statistics(*[np.ones(shape)] * 3) for shape in (2, (2, 3))]
    for name, leaves, said in [
        ("a.npz", {"a": ones, "b": ones}, "of one leaf: got 'a', 'b'"),
        ("a.npz", {"a": wide}, r"one axis of features: 'a' has shape \(2, 3\)"),
        ("a.npz", {"a": Statistics(np.ones(2), np.ones(2))}, "needs count"),
        ("a.pkl", {"a": ones}, r"must end in \.npz"),
    ]:
        with pytest.raises(FormatError, match=said):
            sklearn.write(tmp_path / name, leaves)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("held", [None, 3, {}, {"mean": np.ones(2)}, SimpleNamespace(mean_=1)])
def test_other_objects_are_refused(held):
    with pytest.raises(FormatError, match=r"must have mean_, var_ and n_samples_seen_"):
        attributes.contents(held)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epsilon": "1e-8"}, "a number >= 0 as epsilon: got '1e-8'"),
        ({"clip_obs": np.nan}, "a number >= 0 as clip_obs: got nan"),
        ({"obs_rms": {"mean": np.ones(2)}}, "must hold numbers in var: it holds None"),
        ({"obs_rms": {"mean": np.ones(2), "var": np.ones(3), "count": 1}}, r"var has \(3,\)"),
        ({"obs_rms": {"mean": np.ones(2), "var": np.ones(2), "count": [1, 2]}}, "one count"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(change, said):
    held = {"obs_rms": {"mean": np.ones(2), "var": np.ones(2), "count": 1.0001}}
    with pytest.raises(FormatError, match=said):
        attributes.contents(held | change)


@pytest.mark.parametrize("name", ["MinMaxScaler", "MaxAbsScaler"])
def test_other_scalers_are_no_standard_scaler(tmp_path, data, name):
    # the attributes that scikit-learn's classes have once they were fitted
    data = data[:, [0, 2]]
    low, high, n = data.min(0), data.max(0), len(data)
    most = abs(data).max(0)
    held = {
        "MinMaxScaler": {"scale_": 1 / (high - low), "min_": -low / (high - low)}
        | {"data_min_": low, "data_max_": high, "n_samples_seen_": n},
        "MaxAbsScaler": {"scale_": most, "max_abs_": most, "n_samples_seen_": n},
    }[name]
    for part in (held, {key: held[key] for key in ("scale_", "n_samples_seen_")}):
        np.savez(tmp_path / "scaler.npz", **part)
        for read in (
            lambda part=part: attributes.contents(part),
            lambda part=part: attributes.contents(SimpleNamespace(**part)),
            lambda: Normalizer.load(tmp_path / "scaler.npz"),
        ):
            with pytest.raises(FormatError, match=r"from_statistics\(min="):
                read()


def test_scikit_learn_has_other_classes_with_counts(data):
    preprocessing = library("sklearn.preprocessing")
    decomposition = library("sklearn.decomposition")
    for other in (
        preprocessing.MinMaxScaler(),
        preprocessing.MaxAbsScaler(),
        decomposition.IncrementalPCA(),
    ):
        with pytest.raises(FormatError, match="must be a StandardScaler: it has"):
            attributes.contents(other.fit(data))


@pytest.mark.parametrize("of", ["jaxnorm", "jaxnorm.host"])
def test_our_moments_have_no_prior(data, of):
    data = data[:, [0, 2]]
    moments = importlib.import_module(of).moments(data, 0)
    read = Normalizer.from_object(moments)
    np.testing.assert_allclose(read.mean.ravel(), data.mean(0), rtol=1e-5)
    np.testing.assert_allclose(read.std.ravel(), data.std(0), rtol=1e-5)
    assert read.moments.count.ravel().tolist() == [len(data)] * data.shape[1]
    assert not read.notes
    assert read.formula == Normalizer.fit([data]).formula
    with pytest.raises(FormatError, match="without_prior must be of a RunningMeanStd: got Moments"):
        Normalizer.from_object(moments, without_prior=True)


def test_the_low_parts_of_our_moments_are_added(data):
    x = data[:, [0, 2]].astype(np.float32)
    moments = importlib.import_module("jaxnorm").moments(x, 0)
    read = Normalizer.from_object(moments)
    whole = np.asarray(moments.mean, np.float64) + np.asarray(moments.low.mean)
    np.testing.assert_array_equal(read.mean, whole)
    exact = x.astype(np.float64).mean(0)
    # float32 alone keeps 1e3 to 3e-5
    np.testing.assert_allclose(read.mean[0], exact, rtol=1e-9, atol=1e-8)
    many = replace(moments, count=moments.count + np.float32(2**24 - 50))
    many = replace(many, low=many.low._replace(count=(np.ones((1, 2)), np.ones((1, 2)) / 2)))
    assert Normalizer.from_object(many).moments.count.tolist() == [[2**24 + 1.5] * 2]
