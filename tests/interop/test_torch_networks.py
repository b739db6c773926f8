"""Test whole networks of PyTorch, whose layers are found by their sizes and order."""

import jax
import numpy as np
import pytest
from flax import linen

from jaxnorm import interop
from jaxnorm import linen as jnn

torch = pytest.importorskip("torch")
from interop_torch import drawn, round_trip  # noqa: E402
from interop_values import close, inputs  # noqa: E402

pytestmark = [pytest.mark.usefixtures("ordinary_promotion"), pytest.mark.filterwarnings("ignore")]
KEY = jax.random.key(0)
nn = torch.nn
STAGES = ((4, 1), (4, 1), (6, 2), (6, 1))


class TheirBlock(nn.Module):
    def __init__(self, width, features, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width, features, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(features)
        self.downsample = nn.Sequential()
        if width != features:
            convolution = nn.Conv2d(width, features, 1, stride, bias=False)
            self.downsample = nn.Sequential(convolution, nn.BatchNorm2d(features))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.downsample(x)).relu()


class TheirResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 5, 2, 2, bias=False), nn.BatchNorm2d(4)
        widths = (4, *(features for features, _ in STAGES))
        blocks = [TheirBlock(w, f, s) for w, (f, s) in zip(widths, STAGES, strict=False)]
        self.layer1, self.layer2 = nn.Sequential(*blocks[:2]), nn.Sequential(*blocks[2:])
        self.fc = nn.Linear(6, 10)

    def forward(self, x):
        x = self.layer2(self.layer1(self.bn1(self.conv1(x)).relu()))
        return self.fc(x.mean((2, 3)))


def norm(x):
    return jnn.BatchNorm(use_running_average=True)(x)


def conv(features, size, stride=1):
    return linen.Conv(features, (size, size), stride, padding=size // 2, use_bias=False)


class Block(linen.Module):
    features: int
    stride: int

    @linen.compact
    def __call__(self, x):
        y = linen.relu(norm(conv(self.features, 3, self.stride)(x)))
        y = norm(conv(self.features, 3)(y))
        if x.shape != y.shape:
            x = norm(conv(self.features, 1, self.stride)(x))
        return linen.relu(x + y)


class ResNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(norm(conv(4, 5, 2)(x)))
        for features, stride in STAGES:
            x = Block(features, stride)(x)
        return linen.Dense(10)(x.mean((1, 2)))


def test_a_residual_network(capsys):
    module, x = drawn(TheirResNet()), inputs(2, 16, 16, 3)
    like = jax.eval_shape(ResNet().init, KEY, x)
    variables = interop.load(like, module.state_dict(), framework="torch")
    assert "order of 2" in capsys.readouterr().err
    theirs = module(torch.tensor(np.moveaxis(x, -1, 1))).detach().numpy()
    close(ResNet().apply(variables, x), theirs, 2e-6)
    round_trip(variables, module)


class Encoder(linen.Module):
    """PyTorch's TransformerEncoderLayer, with its names."""

    def setup(self):
        self.self_attn = linen.MultiHeadDotProductAttention(num_heads=2)
        self.linear1, self.linear2 = linen.Dense(8), linen.Dense(6)
        self.norm1, self.norm2 = (jnn.LayerNorm(epsilon=1e-5) for _ in range(2))

    def __call__(self, x):
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.linear2(linen.relu(self.linear1(x))))


def test_equal_names_leave_nothing_to_guess(capsys):
    module = drawn(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True))
    x = inputs(2, 5, 6)
    like = jax.eval_shape(Encoder().init, KEY, x)
    variables = interop.load(like, module.state_dict(), framework="torch")
    assert capsys.readouterr().err == ""
    with torch.no_grad():
        close(Encoder().apply(variables, x), module(torch.tensor(x)).numpy(), 2e-6)
    round_trip(variables, module)
    # and without like
    named = interop.save(variables, framework="torch")
    assert named.keys() == module.state_dict().keys()


def test_numbers_of_layers_in_a_stack(capsys):
    """``layers.0`` and ``layers_0``."""

    class Stack(linen.Module):
        def setup(self):
            self.layers = [Encoder() for _ in range(3)]

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    module, x = drawn(nn.TransformerEncoder(layer, 3)), inputs(2, 5, 6)
    like = jax.eval_shape(Stack().init, KEY, x)
    variables = interop.load(like, module.state_dict(), framework="torch")
    assert capsys.readouterr().err == ""
    with torch.no_grad():
        close(Stack().apply(variables, x), module(torch.tensor(x)).numpy(), 5e-6)


def test_a_network_of_sequences():
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc = nn.Embedding(11, 4), nn.Linear(10, 3)
            self.rnn = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, ids):
            return self.fc(self.rnn(self.embed(ids))[0])

    class Ours(linen.Module):
        def setup(self):
            self.embed, self.fc = linen.Embed(11, 4), linen.Dense(3)
            self.rnn = jnn.LSTM(5, norm=None, num_layers=2, bidirectional=True)

        def __call__(self, ids):
            return self.fc(self.rnn(self.embed(ids)))

    module, ids = drawn(Theirs()), np.arange(12).reshape(2, 6) % 11
    like = jax.eval_shape(Ours().init, KEY, ids)
    variables = interop.load(like, module.state_dict(), framework="torch")
    with torch.no_grad():
        close(Ours().apply(variables, ids), module(torch.tensor(ids)).numpy(), 2e-6)
    named = interop.save(variables, framework="torch")
    assert named.keys() == module.state_dict().keys()
