"""Folding keeps the function, whatever the convolution before a norm, its consumers, and the constants are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm.layers
import torch
from torch import Tensor, nn

import retrofit
from retrofit.export.folding.network import FoldedLayer, fold_network
from retrofit.layers import BatchNormalNormAct2d, WeightStandardizedConv2d
from tests.export.networks import norm


def check(model: nn.Module, size: tuple[int, ...] = (4, 9, 9), tolerance: float = 2e-5) -> list[FoldedLayer]:
    """Compare a network and its folded copy, in float64 and float32, on an input with far values; return the report."""
    model.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, *size, generator=torch.Generator().manual_seed(0)) * 2
    folded = fold_network(model, size)
    with torch.no_grad():
        expected, found = model.double()(x.double()), folded.model(x)
    model.float()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    return folded.layers


FEEDERS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Conv2d(4, 8, 3, padding=1),
    "no bias": lambda: nn.Conv2d(4, 8, 3, stride=2, bias=False),
    "grouped": lambda: nn.Conv2d(4, 8, 3, groups=2, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 3, stride=2),
    "transposed grouped": lambda: nn.ConvTranspose2d(4, 8, 2, groups=2, bias=False),
    "reflecting": lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"),
    "same": lambda: timm.layers.Conv2dSame(4, 8, 3, stride=2),
}


@pytest.mark.parametrize("kind", FEEDERS)
@pytest.mark.parametrize("lmbda", [1.0, 0.3])
def test_feeder(kind: str, lmbda: float) -> None:
    model = nn.Sequential(FEEDERS[kind](), norm(8, running_lambda=torch.full((8,), lmbda)))
    (layer,) = check(model)
    assert layer.form == ("folded" if lmbda == 1 else "two branches")
    folded = retrofit.fold(model, input_size=(4, 9, 9))
    assert isinstance(folded[1], nn.Identity) == (lmbda == 1)


def test_weight_standardised_convolution_becomes_plain() -> None:
    model = nn.Sequential(WeightStandardizedConv2d(4, 8, 3, strength=0.7), norm(8))
    check(model)
    assert type(retrofit.fold(model, input_size=(4, 9, 9))[0]) is nn.Conv2d


class Shared(nn.Module):
    """One convolution called twice, each time with a norm of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList([norm(4), norm(4, running_lambda=torch.ones(4))])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.norms:
            x = layer(self.conv(x))
        return x


class TwoConsumers(nn.Module):
    """A convolution whose output also goes around the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.next = nn.Conv2d(4, 4, 3, padding=1), norm(4), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.next(torch.relu(self.norm(y))) + y


class SharedWeights(nn.Module):
    """Two convolutions with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.two.weight = self.one.weight
        self.norm, self.last = norm(4), norm(4, running_lambda=torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(torch.relu(self.norm(self.one(x)))))


class CalledTwice(nn.Module):
    """One norm after two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3), norm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(torch.relu(self.norm(self.one(x)))))


@pytest.mark.parametrize(
    "model", [Shared(), TwoConsumers(), SharedWeights(), CalledTwice()], ids=lambda m: type(m).__name__
)
def test_layer_that_serves_others_is_left_alone(model: nn.Module) -> None:
    check(model)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.Hardtanh(-1, 1), nn.LeakyReLU(0.1)], ids=str)
@pytest.mark.parametrize("beta", [-0.4, 0.0, 0.4, 5.0])
@pytest.mark.parametrize("padding", [0, 1])
def test_activation(act: nn.Module, beta: float, padding: int) -> None:
    layer = norm(8, bias=torch.full((8,), beta))
    model = nn.Sequential(nn.Conv2d(4, 8, 3), layer, act, nn.Conv2d(8, 5, 3, padding=padding))
    (found,) = check(model)
    one_sided = isinstance(act, (nn.ReLU, nn.ReLU6)) and beta <= 0
    assert found.form == ("one branch" if one_sided else "two branches")


def test_fused_activation() -> None:
    layer = BatchNormalNormAct2d(8)
    layer.load_state_dict(norm(8, bias=-torch.rand(8)).state_dict())
    layer.act = nn.ReLU()
    (found,) = check(nn.Sequential(nn.Conv2d(4, 8, 3), layer, nn.Conv2d(8, 3, 1)))
    assert found == FoldedLayer("1", "one branch")


CONSTANTS = {
    "negative gamma": {"weight": -torch.rand(8) - 0.1},
    "zero gamma": {"weight": torch.tensor([0.0, 1.0] * 4)},
    "all zero": {"weight": torch.zeros(8)},
    "dead channels": {"running_var": torch.tensor([0.0, 1.0] * 4), "running_mean": torch.zeros(8)},
    "large lambda": {"running_lambda": torch.linspace(-3, 4, 8)},
    "lambda at the limits": {"running_lambda": torch.tensor([0.0, 2.0, 1e-4, 2 - 1e-4, 1e-3, -1e-3, 1.0, 1 + 1e-6])},
    "never alive": {"bias": torch.full((8,), -3.0), "running_lambda": torch.full((8,), -1.0)},
}


@pytest.mark.parametrize("case", CONSTANTS)
@pytest.mark.parametrize("beta", [-0.2, 0.3])
def test_constants(case: str, beta: float) -> None:
    layer = norm(8, **{"bias": torch.full((8,), beta), **CONSTANTS[case]})
    # psi has a power of 1 + |h|: where lambda is -3 or 4, rounding of h counts several times
    check(nn.Sequential(nn.Conv2d(4, 8, 3), layer, nn.ReLU(), nn.Conv2d(8, 3, 1)), tolerance=2e-4)


def test_norm_is_the_model() -> None:
    model = norm(4)
    assert [layer.name for layer in check(model)] == [""]


def test_no_feeder_costs_one_batch_norm() -> None:
    model = nn.Sequential(nn.ReLU(), norm(4, running_lambda=torch.ones(4)))
    (found,) = check(model)
    assert found.form == "affine"
    assert isinstance(retrofit.fold(model, input_size=(4, 9, 9))[1], nn.BatchNorm2d)


def test_linear() -> None:
    layer = retrofit.layers.BatchNormalNorm1d(6).eval()
    layer.running_lambda.uniform_(0.3, 1.7)
    check(nn.Sequential(nn.Linear(5, 6), layer, nn.ReLU(), nn.Linear(6, 2)), (5,))


def test_linear_before_channels_first_norm_is_left_alone() -> None:
    """nn.Linear works on the last dimension, the norm on the second."""
    layer = retrofit.layers.BatchNormalNorm1d(6).eval()
    layer.running_lambda.uniform_(0.3, 1.7)
    check(nn.Sequential(nn.Linear(5, 6), layer, nn.Linear(6, 6)), (6, 5))


ESTIMATED: dict[str, Callable[[], nn.Module]] = {
    "group": lambda: retrofit.layers.GroupNormalNorm(2, 8),
    "instance": lambda: retrofit.layers.InstanceNormalNorm2d(8, affine=True),
    "channel": lambda: retrofit.layers.LayerNormalNorm2d(8),
    "layer": lambda: retrofit.layers.LayerNormalNorm(8),
    "batch": lambda: retrofit.layers.BatchNormalNorm2d(8, track_running_stats=False),
    "batch, synchronized": lambda: retrofit.layers.SyncBatchNormalNorm(8, track_running_stats=False),
    "batch, fused": lambda: BatchNormalNormAct2d(8, track_running_stats=False),
}


@pytest.mark.parametrize("kind", ESTIMATED)
@pytest.mark.parametrize("strength", [0.0, 0.6])
@pytest.mark.parametrize("act", [None, nn.ReLU(), nn.SiLU()], ids=str)
@pytest.mark.parametrize("padding", [0, 1])
def test_affine_of_layers_that_estimate(kind: str, strength: float, act: nn.Module | None, padding: int) -> None:
    """It goes into the layer after the norm, never into the one after an activation."""
    layer = ESTIMATED[kind]()
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.uniform_(layer.bias, -1.0, 1.0)
    layer.set_strength(strength)
    convolution = nn.Conv2d(8, 5, 3, padding=padding)
    consumer = nn.Linear(8, 5) if kind == "layer" else convolution
    model = nn.Sequential(nn.Tanh(), layer, *([act] if act else []), consumer)
    (found,) = check(model, (9, 9, 8) if kind == "layer" else (8, 9, 9))
    assert found.form == ("estimated" if strength else "normalization")


@pytest.mark.parametrize("tracked", [True, False])
def test_instance_norms_go_by_their_attribute_as_torchs_do(tracked: bool) -> None:
    layer = retrofit.layers.InstanceNormalNorm2d(8, track_running_stats=True)
    layer.train()(torch.randn(4, 8, 5, 5).exp())
    layer.track_running_stats = tracked
    model = nn.Sequential(nn.Conv2d(3, 8, 1), layer).eval()
    folded = retrofit.fold(model, input_size=(3, 5, 5))
    assert (type(folded[1]).__name__ == "TwoBranch") == tracked
