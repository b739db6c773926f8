"""Compute the papers' recurrent cells in float64 NumPy, one step at a time.

Nothing is folded or fused.
"""

import numpy as np


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def layer(a, epsilon):
    d = a - a.mean(-1, keepdims=True)
    return d / np.sqrt((d**2).mean(-1, keepdims=True) + epsilon)


def rms(a, epsilon):
    return a / np.sqrt((a**2).mean(-1, keepdims=True) + epsilon)


def batch(a, epsilon):
    d = a - a.mean(0)
    return d / np.sqrt((d**2).mean(0) + epsilon)


NORMS = {"layer": layer, "rms": rms, "batch": batch}


def terms(p, x, h):
    return x @ p["input_kernel"], h @ p["recurrent_kernel"]


def affine(p, name, a, norm, epsilon):
    return p[f"{name}_scale"] * norm(a, epsilon)


def relu(a):
    return np.where(a > 0, a, 0)


ACTIVATIONS = {"tanh": np.tanh, "relu": relu}


def rnn_step(p, x, h, norm, placement, epsilon, activation="tanh"):
    a, r = terms(p, x, h)
    activation = ACTIVATIONS[activation]
    if norm is None:
        return (activation(a + r + p["bias"]),)
    if placement == "sum":
        return (activation(p["scale"] * norm(a + r, epsilon) + p["bias"]),)
    return (
        activation(
            affine(p, "input", a, norm, epsilon)
            + affine(p, "recurrent", r, norm, epsilon)
            + p["bias"]
        ),
    )


def lstm_step(p, x, h, c, norm, placement, epsilon):
    a, r = terms(p, x, h)
    if norm is None:
        gates = a + r + p["bias"]
    elif placement == "sum":
        gates = p["scale"] * norm(a + r, epsilon) + p["bias"]
    elif placement == "gate":
        each = [norm(part, epsilon) for part in np.split(a + r, 4, -1)]
        gates = p["scale"] * np.concatenate(each, -1) + p["bias"]
    else:
        gates = (
            affine(p, "input", a, norm, epsilon)
            + affine(p, "recurrent", r, norm, epsilon)
            + p["bias"]
        )
    i, f, g, o = np.split(gates, 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    if norm is None or placement == "sum":
        return sigmoid(o) * np.tanh(c), c
    shown = p["cell_scale"] * norm(c, epsilon) + p["cell_bias"]
    return sigmoid(o) * np.tanh(shown), c if placement == "ba2016" else shown


def gru_reset_first_step(p, x, h, norm, placement, epsilon):
    """As in Cho et al. 2014: r scales h before the product with the candidate's matrix."""
    n = h.shape[-1]
    u_rz, u_n = np.split(p["recurrent_kernel"], [2 * n], -1)
    a_rz, a_n = np.split(x @ p["input_kernel"], [2 * n], -1)
    b_rz, b_n = np.split(p["bias"], [2 * n])

    def joined(part, a, r, b):
        """The pre-activations of r and z, or of n, of the input's and the recurrent term."""
        if norm is None:
            return a + r + b
        own = lambda name: np.split(p[name], [2 * n])[part]
        if placement == "ba2016":
            terms = own("input_scale") * norm(a, epsilon), own("recurrent_scale") * norm(r, epsilon)
            return sum(terms) + b
        each = np.split(a + r, 2, -1) if placement == "gate" and part == 0 else [a + r]
        return own("scale") * np.concatenate([norm(one, epsilon) for one in each], -1) + b

    r, z = np.split(sigmoid(joined(0, a_rz, h @ u_rz, b_rz)), 2, -1)
    candidate = np.tanh(joined(1, a_n, (r * h) @ u_n, b_n))
    return ((1 - z) * candidate + z * h,)


def gru_step(p, x, h, norm, placement, epsilon, reset_after=True):
    if not reset_after:
        return gru_reset_first_step(p, x, h, norm, placement, epsilon)
    n = h.shape[-1]
    (a_rz, a_n), (r_rz, r_n) = (np.split(term, [2 * n], -1) for term in terms(p, x, h))
    (b_rz, b_n) = np.split(p["bias"], [2 * n])
    if norm is None or placement == "ba2016":
        if norm is not None:
            (sx_rz, sx_n), (sh_rz, sh_n) = (
                np.split(p[f"{name}_scale"], [2 * n]) for name in ("input", "recurrent")
            )
            a_rz, a_n = sx_rz * norm(a_rz, epsilon), sx_n * norm(a_n, epsilon)
            r_rz, r_n = sh_rz * norm(r_rz, epsilon), sh_n * norm(r_n, epsilon)
        r, z = np.split(sigmoid(a_rz + r_rz + b_rz), 2, -1)
        candidate = np.tanh(a_n + b_n + r * (r_n + p["recurrent_bias"]))
    else:
        (s_rz, s_n) = np.split(p["scale"], [2 * n])
        parts = np.split(a_rz + r_rz, 2, -1) if placement == "gate" else [a_rz + r_rz]
        r, z = np.split(
            sigmoid(s_rz * np.concatenate([norm(part, epsilon) for part in parts], -1) + b_rz),
            2,
            -1,
        )
        candidate = np.tanh(s_n * norm(a_n + r * r_n, epsilon) + b_n)
    return ((1 - z) * candidate + z * h,)


STEPS = {"rnn": rnn_step, "lstm": lstm_step, "gru": gru_step}


def network(
    name, x, params, norm="layer", placement="ba2016", epsilon=1e-6, initial=None, **variant
):
    """Return ``(state, outputs)`` for x of shape (batch, time, features), without lengths.

    A ``variant`` is ``reset_after`` of a GRU, or ``activation`` of a simple network.
    """
    p = {key: np.asarray(value, np.float64) for key, value in params.items()}
    x = np.asarray(x, np.float64)
    features, rows = (
        p["recurrent_kernel"].shape[1] // {"rnn": 1, "gru": 3, "lstm": 4}[name],
        p["recurrent_kernel"].shape[0],
    )
    widths = (rows, features) if name == "lstm" else (rows,)
    state = tuple(np.zeros((len(x), width)) for width in widths) if initial is None else initial
    outputs = []
    for t in range(x.shape[1]):
        options = {"norm": NORMS.get(norm), "placement": placement, "epsilon": epsilon}
        state = STEPS[name](p, x[:, t], *state, **options, **variant)
        if "projection" in p:
            state = (state[0] @ p["projection"], *state[1:])
        outputs.append(state[0])
    return state, np.stack(outputs, 1)
