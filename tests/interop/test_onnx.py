"""Test the recurrent operators of ONNX against the formulas of its specification in NumPy."""

import jax
import numpy as np
import pytest
from interop_values import OF_SEQUENCES, close, inputs, same_bits

from jaxnorm import interop, recurrent
from jaxnorm import linen as jnn

pytestmark = pytest.mark.usefixtures("ordinary_promotion")
KEY, GATES = jax.random.key(0), {"lstm": 4, "gru": 3, "rnn": 1}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(x, w, r, b):
    """Outputs of the operator LSTM in one direction: gates i, o, f, c."""
    h = c = np.zeros((x.shape[1], r.shape[1]))
    found = []
    for step in x:
        i, o, f, g = np.split(step @ w.T + h @ r.T + b[: len(w)] + b[len(w) :], 4, -1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        found.append(h)
    return np.stack(found)


def gru(x, w, r, b, linear_before_reset):
    """Outputs of the operator GRU in one direction: gates z, r, h."""
    h = np.zeros((x.shape[1], r.shape[1]))
    wz, wr, wh, rz, rr, rh = *np.split(w, 3), *np.split(r, 3)
    bz, br, bh, cz, cr, ch = np.split(b, 6)
    found = []
    for step in x:
        z = sigmoid(step @ wz.T + h @ rz.T + bz + cz)
        reset = sigmoid(step @ wr.T + h @ rr.T + br + cr)
        if linear_before_reset:
            n = np.tanh(step @ wh.T + reset * (h @ rh.T + ch) + bh)
        else:
            n = np.tanh(step @ wh.T + (reset * h) @ rh.T + ch + bh)
        h = (1 - z) * n + z * h
        found.append(h)
    return np.stack(found)


def rnn(x, w, r, b):
    """Outputs of the operator RNN in one direction."""
    outputs = [np.zeros((x.shape[1], r.shape[1]))]
    for step in x:
        inward = step @ w.T + b[: len(w)] + b[len(w) :]
        outputs.append(np.tanh(inward + outputs[-1] @ r.T))
    return np.stack(outputs[1:])


def operator(kind, directions, sizes=(4, 3), start=""):
    """W, R and B of random numbers."""
    features, hidden = sizes
    rows, rng = GATES[kind] * hidden, np.random.default_rng(0)
    shapes = {"W": (rows, features), "R": (rows, hidden), "B": (2 * rows,)}
    return {
        f"{start}{name}": (0.4 * rng.standard_normal((directions, *shape))).astype("float32")
        for name, shape in shapes.items()
    }


CASES = {
    "lstm": ("lstm", lstm, jnn.LSTM, {}),
    "gru": ("gru", lambda *a: gru(*a, linear_before_reset=True), jnn.GRU, {}),
    "gru, before": (
        "gru",
        lambda *a: gru(*a, linear_before_reset=False),
        jnn.GRU,
        {"reset_after": False},
    ),
    "rnn": ("rnn", rnn, jnn.SimpleRNN, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("directions", [1, 2])
def test_operators(case, directions):
    kind, run, model, options = CASES[case]
    x, weights = inputs(6, 2, 4), operator(kind, directions, start="encoder/")
    wide = [[array[d].astype(float) for array in weights.values()] for d in range(directions)]
    theirs = run(x.astype(float), *wide[0])
    if directions == 2:
        back = run(x[::-1].astype(float), *wide[1])[::-1]
        theirs = np.concatenate([theirs, back], -1)
    model = model(3, norm=None, time_major=True, bidirectional=directions == 2, **options)
    shapes = jax.eval_shape(lambda: model.init(KEY, x))
    variables = interop.load(shapes, weights, framework="onnx", names={"": "encoder"})
    close(model.apply(variables, x), theirs, OF_SEQUENCES)
    back = interop.save(variables, framework="onnx", like=weights, names={"": "encoder"})
    same_bits(back, weights)
    if directions == 1:
        like = getattr(recurrent, f"init_{kind}")(KEY, 4, 3, norm=None, **options)
        params = interop.load(like, operator(kind, 1), framework="onnx")
        found = getattr(recurrent, kind)(x, params, norm=None, time_major=True, **options)[1]
        close(found, theirs, OF_SEQUENCES)
        again = interop.load(like, interop.save(params, framework="onnx"), framework="onnx")
        jax.tree.map(np.testing.assert_array_equal, again, params)


def test_without_biases():
    weights = operator("gru", 1)
    like = recurrent.init_gru(KEY, 4, 3, norm=None)
    params = interop.load(like, {name: weights[name] for name in "WR"}, framework="onnx")
    assert not params["bias"].any()
    assert not params["recurrent_bias"].any()


def test_what_is_refused():
    like, weights = recurrent.init_lstm(KEY, 4, 3, norm=None), operator("lstm", 1)
    with pytest.raises(
        ValueError, match=r"W must have shape \(directions, \.\.\.\).*got \(12, 4\)"
    ):
        interop.load(like, weights | {"W": weights["W"][0]}, framework="onnx")
    with pytest.raises(ValueError, match="P must be 0: got peepholes"):
        interop.load(like, weights | {"P": np.ones((1, 9), "f")}, framework="onnx")
    interop.load(like, weights | {"P": np.zeros((1, 9), "f")}, framework="onnx")
    with pytest.raises(ValueError, match=r"recurrent_bias \(3,\): nothing in the file fits it"):
        interop.load(recurrent.init_gru(KEY, 4, 3, norm=None), weights, framework="onnx")
