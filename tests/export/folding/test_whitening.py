"""The whitening of decorrelated layers: into the layer before where that is exact, else a convolution of size 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.export.folding.network import FoldedLayer, fold_network
from retrofit.layers import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    DecorrelatedBatchNormalNorm1d,
    DecorrelatedBatchNormalNorm2d,
    DecorrelatedBatchNormalNorm3d,
    DecorrelatedBatchNormalNormAct2d,
)
from retrofit.layers.decorrelated_batch_norm import DecorrelatedNorm
from tests.export.folding.test_network import FEEDERS
from tests.export.folding.test_network import check as compare
from tests.export.networks import train_a_little
from tests.export.test_api import build

TYPES: dict[str, tuple[Any, Any, Any]] = {
    "dbn": (DecorrelatedBatchNorm1d, DecorrelatedBatchNorm2d, DecorrelatedBatchNorm3d),
    "dbnn": (DecorrelatedBatchNormalNorm1d, DecorrelatedBatchNormalNorm2d, DecorrelatedBatchNormalNorm3d),
}
TO = pytest.mark.parametrize("to", TYPES)
CUTS = {"depthwise": 4, "grouped": 8}
"""Feeders with fewer outputs a group than such groups of channels."""


def norm(to: str, dims: int = 2, strength: float = 1.0, size: int = 4, **changes: Any) -> Any:
    """A layer of 8 channels with an affine of both signs."""
    layer = TYPES[to][dims - 1](8, group_size=size, strength=strength, momentum=1.0)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.5, -1.0, 0.5, 0.0, 1.0, -0.3, 0.7, 1.2]))
        layer.bias.copy_(torch.linspace(-1, 1, 8))
        for name, value in changes.items():
            getattr(layer, name).copy_(torch.as_tensor(value))
    return layer


def check(model: nn.Module, size: tuple[int, ...] = (4, 9, 9), tolerance: float = 2e-5) -> list[FoldedLayer]:
    """Give the model real statistics; compare its folded copy with it in float64; return the report."""
    generator = torch.Generator().manual_seed(1)
    model.train()(torch.randn(64, *size, generator=generator).exp())
    return compare(model, size, tolerance)


@TO
@pytest.mark.parametrize("kind", FEEDERS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_feeder(to: str, kind: str, strength: float, size: int) -> None:
    model = nn.Sequential(FEEDERS[kind](), norm(to, strength=strength, size=size))
    (layer,) = check(model)
    per_group = {"depthwise": 2, "grouped": 4, "transposed grouped": 4}.get(kind, 8)
    folds = strength == 0 or per_group % size == 0
    folded = retrofit.fold(model, input_size=(4, 9, 9))
    convolutions = [m for m in folded.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    assert len(convolutions) == (1 if folds else 2)
    if to == "dbn":
        assert layer == FoldedLayer("1", "folded" if folds else "group convolution")
    else:
        assert layer == FoldedLayer("1", "folded" if strength == 0 else "two branches")


class Around(nn.Module):
    """A convolution whose output also goes around the norm."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.relu(self.norm(y)) + y


class CalledTwice(nn.Module):
    """One norm after two convolutions."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(torch.relu(self.norm(self.one(x)))))


@TO
@pytest.mark.parametrize("block", [Around, CalledTwice])
def test_layer_that_serves_others_is_left_alone(to: str, block: Any) -> None:
    (layer,) = check(block(norm(to)))
    if to == "dbn":
        assert layer.form == "group convolution"
    check(block(norm(to, strength=0.0)))


@TO
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_without_a_feeder(to: str, dims: int, strength: float) -> None:
    (layer,) = check(nn.Sequential(nn.Tanh(), norm(to, dims, strength)), (8, 5, 4, 3)[: dims + 1])
    if to == "dbn":
        assert layer.form == ("group convolution" if strength else "affine")
    check(norm(to, dims, strength), (8, 5, 4, 3)[: dims + 1])


@TO
def test_linear(to: str) -> None:
    check(nn.Sequential(nn.Linear(4, 8), norm(to, 1), nn.ReLU(), nn.Linear(8, 2)), (4,))
    check(nn.Sequential(nn.Tanh(), norm(to, 1), nn.Linear(8, 2)), (8,))
    (layer,) = check(nn.Sequential(nn.Linear(8, 8), norm(to, 1)), (8, 8))  # on the last dimension, not the channels
    assert layer.form in ("group convolution", "two branches")


@pytest.mark.parametrize("beta", [-0.4, 0.4])
def test_activation_behind_the_transform(beta: float) -> None:
    layer = norm("dbnn", bias=torch.full((8,), beta))
    (found,) = check(nn.Sequential(nn.Conv2d(4, 8, 3), layer, nn.ReLU(), nn.Conv2d(8, 5, 3)))
    assert found == FoldedLayer("1", "one branch" if beta < 0 else "two branches")


def test_fused_activation() -> None:
    layer = DecorrelatedBatchNormalNormAct2d(8, group_size=4)
    layer.load_state_dict(norm("dbnn", bias=torch.full((8,), -0.4)).state_dict())
    layer.act = nn.ReLU()
    (found,) = check(nn.Sequential(nn.Conv2d(4, 8, 3), layer, nn.Conv2d(8, 3, 1)))
    assert found == FoldedLayer("1", "one branch")


def test_untracked_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), DecorrelatedBatchNorm2d(8, track_running_stats=False))
    with pytest.raises(RetrofitError, match="no running statistics"):
        fold_network(model, (4, 9, 9))


def test_polynomials(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm("dbnn"), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    images = list(torch.randn(4, 16, 3, 6, 6).exp())
    model(torch.cat(images))
    model.eval()
    report = retrofit.export_onnx(
        model, tmp_path / "out.onnx", fold="poly", input_size=(3, 6, 6), calibrate=images, degree=2, tolerance=0.5
    )
    assert report.parity.passed
    assert [layer.form for layer in report.layers] == ["polynomial"]
    assert report.nodes["Conv"] == 1


def parity(name: str, to: str, strength: float, path: Path) -> None:
    model = build(name, to, 64)
    for module in model.modules():
        if isinstance(module, DecorrelatedNorm):
            module.momentum = 1.0  # running statistics are the last batch's: two steps from the first values explode
    train_a_little(model, 64, strength, batch=16)
    report = retrofit.export_onnx(model, path, input_size=(3, 64, 64))
    assert report.parity.passed
    assert report.parity.tolerance == 1e-4
    session = onnxruntime.InferenceSession(str(path))
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
    found = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_parity(tmp_path: Path) -> None:
    parity("test_resnet", "dbnn", 1.0, tmp_path / "out.onnx")


@pytest.mark.slow
@TO
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["resnet18", "tv:resnet50", "tf_efficientnet_lite0"])
def test_parity_of_every_network(name: str, to: str, strength: float, tmp_path: Path) -> None:
    parity(name, to, strength, tmp_path / "out.onnx")
