"""What the papers compare with, as ONNX: rival layers, degrees of gaussianization, standardised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import timm
import torch
import torchvision
from torch import nn

import retrofit
from retrofit.export.api import _mean_lambdas
from retrofit.inputs import Call
from retrofit.layers import GroupNormalNorm, LayerNormalNorm
from retrofit.layers.lambdas import lambda_values
from tests.export.networks import norm, train_a_little
from tests.half_resnet import HALF


def network(name: str) -> nn.Module:
    if name.startswith("tv:"):
        return torchvision.models.get_model(name[3:], weights=None)
    return timm.create_model(name, **(HALF if name == "test_resnet" else {}))


def exported(model: nn.Module, path: Path, size: int) -> onnx.ModelProto:
    """Export, with the comparison against ONNX Runtime at 1e-4 that exporting includes, and read the file."""
    report = retrofit.export_onnx(model, path, input_size=(3, size, size))
    assert report.parity.passed
    assert report.parity.tolerance == 1e-4
    return onnx.load(path)


@pytest.mark.parametrize("to", ["evonorm-s0", "frn-tlu"])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("test_resnet", 32),
        pytest.param("tv:resnet50", 64, marks=pytest.mark.slow),
        # At 64 px FRN divides by the power of 2 x 2 maps, and float32 itself is 1e-3 away from float64.
        pytest.param("tf_efficientnet_lite0", 128, marks=pytest.mark.slow),
    ],
)
def test_rival_layers(to: str, name: str, size: int, tmp_path: Path) -> None:
    model, _ = retrofit.convert(network(name), to, check=False)
    exported(train_a_little(model, size, 1.0), tmp_path / "out.onnx", size)


@pytest.mark.parametrize(
    ("to", "strength", "restore"), [("gn-pn", 0.6, True), pytest.param("ln", 1.0, False, marks=pytest.mark.slow)]
)
def test_standardised_weights_are_plain_weights(to: str, strength: float, restore: bool, tmp_path: Path) -> None:
    model, report = retrofit.convert(network("test_resnet"), to, ws=True, pn_restore=restore, check=False)
    assert any(row.kind == "convolution" and row.status == "converted" for row in report.plan.edits)
    file = exported(train_a_little(model, 32, strength), tmp_path / "out.onnx", 32)
    convolutions = [node for node in file.graph.node if node.op_type == "Conv"]
    assert convolutions
    fed = {name for node in file.graph.node for name in node.input}
    four = {i.name for i in file.graph.initializer if len(i.dims) == 4}
    assert four & fed == {node.input[1] for node in convolutions}  # no arithmetic on weights is left


def test_the_file_holds_the_standardised_weights(tmp_path: Path) -> None:
    """Where nothing else folds into a convolution, its weights in the file are those that training used."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    model, _ = retrofit.convert(model, "gn", ws=True)
    retrofit.set_strength(model, 1.0)
    with torch.no_grad():
        model[0].weight.mul_(1.7).add_(0.2)
    file = exported(model.eval(), tmp_path / "out.onnx", 8)
    (conv,) = [node for node in file.graph.node if node.op_type == "Conv"]
    (found,) = [i for i in file.graph.initializer if i.name == conv.input[1]]
    scale, _ = model[1].input_affine()
    expected = (model[0].standardized_weight().double() * scale.view(-1, 1, 1, 1)).float()
    weight = torch.from_numpy(onnx.numpy_helper.to_array(found).copy())
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.4])
def test_alpha_is_in_every_form(alpha: float, tmp_path: Path) -> None:
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8), GroupNormalNorm(2, 8),
        nn.Sequential(nn.Flatten(), LayerNormalNorm(8 * 4 * 4)),
    ).eval()  # fmt: skip
    for module in model.modules():
        if isinstance(module, retrofit.layers.NormalityMixin):
            module.alpha = alpha
            module.set_strength(0.8)
    expected = 1 + 0.8 * alpha * (model[1].running_lambda.double() - 1)
    torch.testing.assert_close(model[1].channel_map().lmbda, expected)
    file = exported(model, tmp_path / "out.onnx", 8)
    assert any(node.op_type == "Log" for node in file.graph.node) == bool(alpha)
    images = torch.randn(4, 3, 8, 8).exp()
    for name, frozen in _mean_lambdas(model, [Call((images,))]).items():
        estimate = float(lambda_values(model, images)[name].double().mean())
        assert frozen == pytest.approx(1 + 0.8 * alpha * (estimate - 1), abs=1e-6)
