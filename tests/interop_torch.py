"""Help tests of weights from PyTorch: modules with random weights, and their outputs."""

import jax
import numpy as np
import pytest
from interop_values import same_bits

from jaxnorm import interop

torch = pytest.importorskip("torch")


def drawn(module, seed=0):
    """The module with random parameters and statistics, in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.dtype.is_floating_point and not name.endswith(("_u", "_v")):
            with torch.no_grad():
                # errors would grow in networks of larger weights
                size = 0.4 if "weight_hh" in name else 1
                value = size * torch.randn(tensor.shape, generator=generator)
                tensor.copy_(value.abs() + 0.5 if "var" in name else value)
    return module.eval()


def output(module, x):
    """The output in float64 of a module for channels first, given and returned with channels last.

    A module in training goes on by one step.
    """
    first = torch.tensor(np.moveaxis(x, -1, 1) if x.ndim > 2 else x)
    for part in module.modules():
        # the default of RMSNorm depends on the dtype
        if getattr(part, "eps", 0) is None:
            part.eps = torch.finfo(torch.float32).eps
    with torch.no_grad():
        y = module.double()(first.double()).numpy()
    module.float()  # as it was: float64 holds every float32
    return np.moveaxis(y, 1, -1) if y.ndim > 2 else y


def round_trip(variables, module, **options):
    """Check the way back to the same state dict, and that it also loads from there."""
    state = module.state_dict()
    back = interop.save(variables, framework="torch", like=state, **options)
    same_bits(back, {name: tensor.numpy() for name, tensor in state.items()})
    again = interop.load(variables, back, framework="torch", show=False, **options)
    jax.tree.map(np.testing.assert_array_equal, again, variables)
