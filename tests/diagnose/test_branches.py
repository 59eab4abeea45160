"""Which layers follow each other: chains, branches, and shortcuts that go around layers."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor, nn

from retrofit.diagnose.branches import main_path, predecessors
from retrofit.diagnose.probe import probes


def found(model: nn.Module) -> dict[str, tuple[str, ...]]:
    with torch.no_grad():
        return predecessors(model.eval(), probes(model), torch.randn(1, 3, 32, 32))


def test_a_shortcut_with_a_norm_is_a_branch_and_one_without_is_not() -> None:
    before = found(timm.create_model("resnet18", num_classes=2))
    assert before["bn1"] == ()
    assert before["layer1.0.bn1"] == ("bn1",)
    assert before["layer1.1.bn1"] == ("layer1.0.bn2",)  # and not bn1, past the identity
    assert before["layer2.0.bn1"] == before["layer2.0.downsample.1"] == ("layer1.1.bn2",)
    assert before["layer2.1.bn1"] == ("layer2.0.bn2", "layer2.0.downsample.1")
    assert set(before) - set(main_path(before)) == {f"layer{n}.0.downsample.1" for n in (2, 3, 4)}


def test_a_vision_transformer_is_a_chain() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=2)
    before = found(model)
    names = [probe.name for probe in probes(model)]
    assert before == {name: tuple(names[max(number - 1, 0) : number]) for number, name in enumerate(names)}
    assert main_path(before) == names


class Odd(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(0.5)
        x = self.first(x)
        if self.way == "twice":
            return self.first(self.second(x))
        if self.way == "without gradients":
            with torch.no_grad():
                x = x * 2
        if self.way == "into a view":
            x.unbind(0)[0].mul_(2)
        return self.second(x)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("in place", {"first": (), "second": ("first",)}),
        ("twice", {"first": (), "second": ("first",)}),
        ("without gradients", {"first": (), "second": ()}),
        ("into a view", {}),
    ],
)
def test_odd_networks(way: str, expected: dict[str, tuple[str, ...]]) -> None:
    model = Odd(way).requires_grad_(False)
    assert found(model) == expected
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
