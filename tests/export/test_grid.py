"""Every target through every way out, on small networks with random affines, statistics and lambdas.

No cell skips itself: what a cell refuses is listed by name, with its message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.utils._pytree import tree_leaves

import retrofit
from retrofit.layers import StrengthMixin

SIZE = 32


class Own(nn.Module):
    """A user's own network: `norm`s followed by an activation with parameters, by one that is a call, and by none."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.first, self.prelu = nn.Conv2d(3, 8, 3, 2, 1), norm(8), nn.PReLU(8)
        self.depthwise, self.second = nn.Conv2d(8, 8, 3, groups=8, bias=False), norm(8)
        self.up, self.third = nn.ConvTranspose2d(8, 8, 2, 2), norm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.prelu(self.first(self.stem(x)))
        y = torch.relu(self.second(self.depthwise(x)))
        y = self.third(self.up(y))
        return {"map": y, "scores": self.head(y.mean((2, 3)))}


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "test_resnet": lambda: timm.create_model("test_resnet", num_classes=5),
    "test_efficientnet": lambda: timm.create_model("test_efficientnet", num_classes=5),
    "test_efficientnet_gn": lambda: timm.create_model("test_efficientnet_gn", num_classes=5),
    "test_convnext": lambda: timm.create_model("test_convnext", num_classes=5),
    "test_vit": lambda: timm.create_model("test_vit", num_classes=5, img_size=SIZE),
    "tv:mobilenet_v2": lambda: torchvision.models.mobilenet_v2(width_mult=0.1, num_classes=5),
    "own bn": lambda: Own(nn.BatchNorm2d),
    "own gn": lambda: Own(lambda channels: nn.GroupNorm(2, channels)),
    "own in": lambda: Own(lambda channels: nn.InstanceNorm2d(channels, affine=True)),
}
BATCH = ("test_resnet", "test_efficientnet", "tv:mobilenet_v2", "own bn")
TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("bnn", "gn", "ln", "gn-pn", "ln-pn", "frozen", "frn-tlu"), BATCH),
    # Not on MobileNet's narrow layers: of groups of 16 channels that come from 2 or 3, float32 has too few digits.
    **dict.fromkeys(("dbn", "dbnn", "evonorm-s0"), ("test_resnet", "test_efficientnet", "own bn")),
    "lnn": ("test_convnext", "test_vit"),
    "gnn": ("test_efficientnet_gn", "own gn"),
    "inn": ("own in",),
    "normal": ("test_resnet", "test_convnext", "own gn", "own in"),
}
WITHOUT_STRENGTH = ("frozen", "evonorm-s0", "frn-tlu")
CELLS = [
    (to, name, strength)
    for to, names in TARGETS.items()
    for name in names
    for strength in ((1.0,) if to in WITHOUT_STRENGTH else (0.0, 0.5, 1.0))
]


def trained(to: str, name: str, strength: float) -> nn.Module:
    """A converted network with statistics of images, random affines, and lambdas from 0.5 to 1.5."""
    model = NETWORKS[name]()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1.0
        model.train()(images(16, seed=1))
        model, _ = retrofit.convert(model.eval(), to)
        for module in model.modules():
            if isinstance(module, StrengthMixin):
                for parameter in module.parameters(recurse=False):
                    parameter.add_(0.4 * torch.randn_like(parameter))
            lmbda = getattr(module, "running_lambda", None)
            if lmbda is not None:
                lmbda.uniform_(0.5, 1.5)
    if to not in WITHOUT_STRENGTH:
        retrofit.set_strength(model, strength)
    if to in ("dbn", "dbnn"):
        model.train()(images(64, seed=2))
    return model.eval()


def images(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).exp()


def assert_close(found: Any, model: nn.Module, x: torch.Tensor, tolerance: float) -> None:
    """Compare with the network in float64, as far as its own float32 holds it: drawn lambdas amplify rounding."""
    exact, own = tree_leaves(copy.deepcopy(model).double()(x.double())), tree_leaves(model(x))
    for ours, theirs, rounded in zip(tree_leaves(found), exact, own, strict=True):
        rounding = 10 * float((rounded - theirs).abs().max())
        bound = max(tolerance * float(theirs.abs().max()), rounding)
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=bound)


QUICK = [cell if cell[1] != "tv:mobilenet_v2" else pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS]


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_fold(cell: tuple[str, str, float]) -> None:
    model, x = trained(*cell), images(2, seed=3)
    with torch.no_grad():
        folded = retrofit.fold(model, input_size=(3, SIZE, SIZE))
        assert_close(folded(x), model, x, 1e-4)
        assert not [module for module in folded.modules() if isinstance(module, StrengthMixin)]


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_export(cell: tuple[str, str, float], tmp_path: Path) -> None:
    model, x = trained(*cell), images(2, seed=3)
    with torch.no_grad():
        report = retrofit.export_onnx(model, tmp_path / "out.onnx", input_size=(3, SIZE, SIZE))
        assert report.parity.passed
        session = onnxruntime.InferenceSession(str(tmp_path / "out.onnx"))
        found = [torch.from_numpy(array) for array in session.run(None, {"input": x.numpy()})]
        assert_close(found, model, x, 1e-4)
