"""Test that whatever calls a user's model says which argument is wrong, with the model's error."""

from functools import partial

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as fnx

import jaxnorm as jn

KEY, X = jax.random.key(0), np.ones((2, 3), np.float32)


class Net(fnn.Module):
    """The linen model."""

    @fnn.compact
    def __call__(self, x):
        return fnn.BatchNorm(use_running_average=True, name="norm")(fnn.Dense(4, name="dense")(x))


class Twin(fnx.Module):
    """The same of nnx."""

    def __init__(self):
        self.dense = fnx.Linear(3, 4, rngs=fnx.Rngs(0))
        self.norm = jn.nnx.BatchNorm(4, use_running_average=True, rngs=fnx.Rngs(0))

    def __call__(self, x):
        return self.norm(self.dense(x))


class Training(fnn.Module):
    """The linen model in training."""

    @fnn.compact
    def __call__(self, x):
        return fnn.BatchNorm(use_running_average=False)(fnn.Dense(4, name="dense")(x))


class Failing(fnn.Module):
    """Its own error has several lines."""

    def __call__(self, x):
        raise RuntimeError("first\nsecond")


class FailingTwin(fnx.Module):
    def __call__(self, x):
        raise RuntimeError("first\nsecond")


VARIABLES = Net().init(KEY, X)
FROZEN, _ = jn.linen.freeze(Net(), VARIABLES, X)
LINEN = {
    "fold": jn.linen.fold,
    "swap": partial(jn.linen.swap, to="rms"),
    "freeze": jn.linen.freeze,
    "unfreeze": jn.linen.unfreeze,
    "diagnose": jn.linen.diagnose,
    "compare": partial(jn.linen.compare, rounds=1, float64=False),
}
NNX = {
    "fold": jn.nnx.fold,
    "freeze": jn.nnx.freeze,
    "unfreeze": jn.nnx.unfreeze,
    "diagnose": jn.nnx.diagnose,
    "compare": partial(jn.nnx.compare, rounds=1, float64=False),
}
CHOOSING = ("fold", "swap", "freeze", "unfreeze")


def model_of(name):
    return FROZEN if name == "unfreeze" else Net()


def said(call, *given, **named):
    """The type, text and cause of an error, whose text is one line."""
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*given, **named)
    error = caught.value
    assert str(error).endswith(".")
    assert "\n" not in str(error)
    return type(error), str(error), error.__cause__ or error.__context__


@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    call, model = LINEN[name], model_of(name)
    kind, text, cause = said(call, model, VARIABLES, X[:, :2])
    assert kind is ValueError
    assert text.startswith(
        "variables and inputs must fit each other: Net raises ScopeParamShapeError for "
        "float32[2, 2]: "
    )
    assert "/dense" in text
    assert type(cause).__name__ == "ScopeParamShapeError"
    kind, text, cause = said(call, model, VARIABLES, X, X)
    assert issubclass(kind, TypeError)
    assert text.startswith("inputs must fit Net.__call__(x): got 2 by position, too many")
    assert isinstance(cause, TypeError)
    kind, text, _ = said(call, model, VARIABLES, X, trian=True)
    assert "got 1 by position and trian by keyword, an unexpected keyword" in text
    for other in ({"params": {"other": {"kernel": X}}}, {"params": VARIABLES["params"]}):
        kind, text, cause = said(call, model, other, X)
        assert text.startswith("variables must be those of the model: Net raises Scope")
        assert "https" not in text
        assert cause is not None
    kind, text, _ = said(call, 3, VARIABLES, X)
    assert kind is TypeError
    assert text.startswith("model must be a module of flax.linen: got int.")
    kind, text, cause = said(call, model, 3, X)
    assert kind is TypeError
    assert text.startswith("variables must be what init returns, a dict of collections: got int")


@pytest.mark.parametrize("name", NNX)
def test_nnx(name):
    call, model = NNX[name], Twin()
    if name == "unfreeze":
        jn.nnx.freeze(model)
    kind, text, cause = said(call, model, X[:, :2])
    assert kind is TypeError
    assert text.startswith(
        "inputs and model must fit each other: Twin raises TypeError for float32[2, 2]: "
    )
    assert isinstance(cause, TypeError)
    kind, text, cause = said(call, model, X, X)
    assert issubclass(kind, TypeError)
    assert text.startswith("inputs must fit Twin.__call__(x): got 2 by position, too many")
    kind, text, _ = said(call, model, X, trian=True)
    assert "got 1 by position and trian by keyword, an unexpected keyword" in text
    kind, text, _ = said(call, 3, X)
    assert kind is TypeError
    assert text.startswith("model must be a module of flax.nnx: got int.")


@pytest.mark.parametrize(
    "call",
    [
        *(partial(LINEN[name], Failing(), {}, X) for name in LINEN if name != "unfreeze"),
        *(partial(NNX[name], FailingTwin(), X) for name in ("fold", "diagnose", "compare")),
    ],
)
def test_errors_of_the_model_itself(call):
    kind, text, cause = said(call)
    assert kind is ValueError
    assert "raises RuntimeError for float32[2, 3]: first." in text
    assert isinstance(cause, RuntimeError)


CHOICES = {
    "path": ("nowhere", ValueError, r"only must name .*norms by their paths .* got 'nowhere'"),
    "type": (fnn.Dropout, ValueError, r"the model must .* norm that only names"),
    "module": ([fnn.Dense, fnx.Linear], ValueError, r"the model must .* norm that only names"),
    "predicate": (lambda path, norm: False, ValueError, r"must .* norm that only names"),
    "one argument": (lambda path: True, TypeError, "a function of only must take path and module"),
    "error": (lambda path, norm: norm.no, ValueError, "takes 'norm': it raises AttributeError: "),
    "number": (3, TypeError, "only must be a class, a path, a function .* got 3"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_choices_of_norms(case):
    only, error, message = CHOICES[case]
    for name in CHOOSING:
        with pytest.raises(error, match=message):
            LINEN[name](model_of(name), VARIABLES, X, only=only)
    for call in (
        partial(jn.nnx.fold, Twin(), X),
        partial(jn.nnx.freeze, Twin()),
        partial(jn.nnx.unfreeze, jn.nnx.freeze(Twin())[0]),
        partial(jn.nnx.swap, Twin(), to="rms"),
    ):
        with pytest.raises(error, match=message):
            call(only=only)


@pytest.mark.parametrize(
    ("without", "error", "message"),
    [
        ("nowhere", ValueError, r"without must name norms of Flax's .* got 'nowhere'; there are "),
        (fnn.Dense, ValueError, r"without must name classes of norms: got flax\.linen.*\.Dense\."),
        (lambda path: True, TypeError, "a function of without must take path and module"),
        (3, TypeError, "without must be a class, a path"),
    ],
)
def test_norms_that_stay(without, error, message):
    with pytest.raises(error, match=message):
        LINEN["compare"](Net(), VARIABLES, X, without=without)
    with pytest.raises(error, match=message):
        NNX["compare"](Twin(), X, without=without)
    with pytest.raises(error, match=message):
        jn.nnx.adopt(Twin(), without=without)
    if without != "nowhere":
        with pytest.raises(error, match=message), jn.linen.adopted(without=without):
            pass


def test_batches_of_a_population():
    variables, batches = Training().init(KEY, X), [X, X[:, :2]]
    kind, text, cause = said(jn.linen.recalibrate, Training(), variables, batches)
    assert kind is ValueError
    assert text.startswith("variables and inputs must fit each other: Training raises ScopeParam")
    assert "for float32[2, 2]: " in text
    assert type(cause).__name__ == "ScopeParamShapeError"
    text = said(jn.linen.recalibrate, Training(), variables, [(X, X)])[1]
    assert text.startswith("inputs must fit Training.__call__(x): got 2 by position, too many")
    text = said(jn.linen.recalibrate, Training(), {"params": variables["params"]}, [X])[1]
    assert text.startswith("variables must have running statistics, mean and var in batch_stats")
    assert "got int" in said(jn.linen.recalibrate, 3, variables, [X])[1]
    assert "got int" in said(jn.linen.recalibrate, Training(), 3, [X])[1]
    model = Twin()
    before = jax.tree.leaves(fnx.state(model))
    kind, text, _ = said(jn.nnx.recalibrate, model, batches)
    assert text.startswith("inputs and model must fit each other: Twin raises TypeError for float")
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(fnx.state(model)), before)
    assert "got int" in said(jn.nnx.recalibrate, 3, batches)[1]


def test_what_the_call_updates_must_be_mutable():
    norm = fnn.BatchNorm(use_running_average=False)
    variables = norm.init(KEY, jnp.asarray(X))
    text = said(jn.linen.freeze, norm, variables, X, mutable=False)[1]
    assert text.startswith("mutable must name what the call updates: BatchNorm raises Modify")
