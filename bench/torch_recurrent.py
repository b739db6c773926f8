"""PyTorch's recurrent networks, for bench.recurrent."""

from collections.abc import Callable

import torch


class TorchLayer(torch.nn.Module):
    """The layer-normalized LSTM of PyTorch's own scripts, with the cell's norm where Ba et al. have
    it.
    """

    def __init__(self, in_features: int, features: int):
        super().__init__()
        self.wx = torch.nn.Parameter(torch.randn(in_features, 4 * features) / in_features**0.5)
        self.wh = torch.nn.Parameter(torch.randn(features, 4 * features) / features**0.5)
        self.nx, self.nh, self.nc = (
            torch.nn.LayerNorm(n) for n in (4 * features, 4 * features, features)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(x.shape[1], self.wh.shape[0])
        c, outputs = h, []
        for xg in self.nx(x @ self.wx).unbind(0):
            i, f, g, o = (xg + self.nh(h @ self.wh)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.nc(c).tanh()
            outputs.append(h)
        return torch.stack(outputs)


def torch_calls(
    batch: int, steps: int, in_features: int, features: int
) -> dict[str, tuple[Callable, Callable]]:
    """Outputs alone and gradients, by name."""
    x, ct = torch.randn(steps, batch, in_features), torch.randn(steps, batch, features)

    def pair(forward, params):
        def gradients():
            inputs = x.clone().requires_grad_()
            return torch.autograd.grad((forward(inputs) * ct).sum(), [inputs, *params])

        def alone():
            with torch.no_grad():
                return forward(x)

        return alone, gradients

    plain = torch.nn.LSTM(in_features, features)
    scripted = torch.jit.script(TorchLayer(in_features, features))
    return {
        "torch LSTM, no norm": pair(lambda x: plain(x)[0], list(plain.parameters())),
        "torch LN-LSTM, script": pair(scripted, list(scripted.parameters())),
    }
