"""Test weight norm and spectral norm of PyTorch, in its old and its new form."""

import jax
import numpy as np
import pytest
from flax import linen, nnx

from jaxnorm import interop
from jaxnorm import linen as jnn
from jaxnorm import nnx as jnnx

torch = pytest.importorskip("torch")
from interop_torch import drawn, output, round_trip  # noqa: E402
from interop_values import close, inputs, same_bits  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY = jax.random.key(0)
nn, utils = torch.nn, torch.nn.utils
OLD_AND_NEW = {"old": utils, "parametrized": utils.parametrizations}
LAYERS = {
    "Linear": (lambda: nn.Linear(6, 4), linen.Dense(4), (5, 6)),
    "Conv1d": (lambda: nn.Conv1d(6, 4, 3), linen.Conv(4, (3,), padding="VALID"), (2, 7, 6)),
    "Conv2d": (lambda: nn.Conv2d(6, 4, 3), linen.Conv(4, (3, 3), padding="VALID"), (2, 5, 6, 6)),
}


class Wrapped(linen.Module):
    """A norm of weights as a part of a model, with its layer next to it."""

    norm: type
    layer: linen.Module
    options: tuple = ()

    @linen.compact
    def __call__(self, x, **arguments):
        # by the names that Flax gives them
        return self.norm(self.layer.copy(name=None, parent=self), **dict(self.options))(
            x, **arguments
        )


def shapes_of(model, x, **arguments):
    return jax.eval_shape(lambda: model.init(KEY, x, **arguments))


@pytest.mark.parametrize("form", OLD_AND_NEW)
@pytest.mark.parametrize("case", LAYERS)
def test_weight_norm(case, form):
    make, layer, shape = LAYERS[case]
    module, x = drawn(OLD_AND_NEW[form].weight_norm(make())), inputs(*shape)
    model = Wrapped(jnn.WeightNorm, layer)
    variables = interop.load(shapes_of(model, x), module.state_dict(), framework="torch")
    close(model.apply(variables, x), output(module, x), 1e-6)
    round_trip(variables, module)


@pytest.mark.parametrize("form", OLD_AND_NEW)
@pytest.mark.parametrize(("dim", "axis"), [(0, -2), (1, -1)])
def test_weight_norm_of_a_transposed_convolution(form, dim, axis):
    """Axis 0 of PyTorch's weight is the inputs', axis 1 the outputs'."""
    module = nn.ConvTranspose1d(6, 4, 3, stride=2)
    module, x = drawn(OLD_AND_NEW[form].weight_norm(module, dim=dim)), inputs(2, 5, 6)
    layer = linen.ConvTranspose(4, (3,), strides=(2,), padding="VALID")
    model = Wrapped(jnn.WeightNorm, layer, (("feature_axes", axis),))
    variables = interop.load(shapes_of(model, x), module.state_dict(), framework="torch")
    close(model.apply(variables, x), output(module, x), 1e-6)
    round_trip(variables, module)


@pytest.mark.skipif(not hasattr(nnx, "WeightNorm"), reason="Flax 0.12.1 or newer has the class")
@pytest.mark.parametrize("form", OLD_AND_NEW)
def test_weight_norm_of_nnx(form):
    module, x = drawn(OLD_AND_NEW[form].weight_norm(nn.Linear(6, 4))), inputs(5, 6)
    model = jnnx.WeightNorm(nnx.Linear(6, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    interop.load(model, module.state_dict(), framework="torch")
    close(model(x), output(module, x), 1e-6)
    state = {name: tensor.numpy() for name, tensor in module.state_dict().items()}
    same_bits(interop.save(model, framework="torch", like=state), state)


def test_one_gain_for_all_weights():
    module, x = drawn(utils.weight_norm(nn.Linear(6, 4), dim=None)), inputs(5, 6)
    model = Wrapped(jnn.WeightNorm, linen.Dense(4), (("feature_axes", None),))
    variables = interop.load(shapes_of(model, x), module.state_dict(), framework="torch")
    close(model.apply(variables, x), output(module, x), 1e-6)
    round_trip(variables, module)


@pytest.mark.parametrize("case", LAYERS)
def test_the_next_step_of_old_spectral_norm(case):
    """Both begin with v = W' u: sigma, the output and the stored vector are equal."""
    make, layer, shape = LAYERS[case]
    module, x = drawn(utils.spectral_norm(make())), inputs(*shape)
    model = Wrapped(jnn.SpectralNorm, layer)
    variables = interop.load(
        shapes_of(model, x, update_stats=True), module.state_dict(), framework="torch"
    )
    back = interop.save(variables, framework="torch", like=module.state_dict())
    theirs = {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}
    np.testing.assert_array_equal(back["weight_u"], theirs["weight_u"])
    np.testing.assert_array_equal(back["weight_orig"], theirs["weight_orig"])
    y, after = model.apply(variables, x, update_stats=True, mutable=["batch_stats"])
    close(y, output(module.train(), x), 1e-6)
    new = interop.save({**variables, **after}, framework="torch", like=theirs)
    close(new["weight_u"], module.weight_u.numpy(), 1e-6)


@pytest.mark.parametrize("case", LAYERS)
def test_the_next_step_of_parametrized_spectral_norm(case):
    """It begins with u = W v, half a step later than ours: the stored vector becomes equal, and
    sigma is between those of two steps of ours.
    """
    make, layer, shape = LAYERS[case]
    module, x = drawn(utils.parametrizations.spectral_norm(make())), inputs(*shape)
    # a vector that is far from converged
    state = module.state_dict()
    weight = state["parametrizations.weight.original"].flatten(1)
    u = torch.nn.functional.normalize(torch.ones(4), dim=0)
    v = torch.nn.functional.normalize(weight.T @ u, dim=0)
    state["parametrizations.weight.0._u"].copy_(u)
    state["parametrizations.weight.0._v"].copy_(v)
    model = Wrapped(jnn.SpectralNorm, layer)
    variables = interop.load(
        shapes_of(model, x, update_stats=True), module.state_dict(), framework="torch"
    )
    noted = interop.match(variables, module.state_dict(), framework="torch").notes
    assert "half a step ahead" in " ".join(noted)
    back = interop.save(variables, framework="torch", like=module.state_dict())
    close(back["parametrizations.weight.0._v"], v.numpy(), 1e-6)
    stats = jax.tree.leaves_with_path(variables["batch_stats"])
    sigma = {str(path[-1]): leaf for path, leaf in stats}
    found = next(leaf for name, leaf in sigma.items() if "sigma" in name)
    np.testing.assert_allclose(found, u @ (weight @ v), rtol=1e-6)
    sigmas = []
    steps = variables
    for _ in range(2):
        _, after = model.apply(steps, x, update_stats=True, mutable=["batch_stats"])
        steps = {**steps, **after}
        sigmas.append(float(min(jax.tree.leaves(after), key=np.size)))
        new = interop.save(steps, framework="torch", like=state)
        if len(sigmas) == 1:
            module.train()(torch.tensor(np.moveaxis(x, -1, 1) if x.ndim > 2 else x))
            close(new["parametrizations.weight.0._u"], state["parametrizations.weight.0._u"], 1e-6)
    theirs = state["parametrizations.weight.0._u"] @ (
        weight @ state["parametrizations.weight.0._v"]
    )
    assert sigmas[0] <= float(theirs) <= sigmas[1]
