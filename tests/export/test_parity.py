"""Folding compares itself with what it was given: whatever the fold got wrong, it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError
from retrofit.export import api
from retrofit.export.parity import Check, Parity, answer, compare, reference
from tests.export.networks import norm


class Far(nn.Module):
    """Differs from the identity beyond 100 only."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 100, 2 * x, x)


class Features(nn.Module):
    """Gives a large map and small scores, as a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), norm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.norm(self.conv(x))
        return {"map": [1000 * x], "scores": self.head(x.mean((2, 3)))}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()


def broken(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let folding go wrong by what `change` does to the folded network."""
    real = api.fold_network

    def wrong(*args: Any) -> Any:
        folded = real(*args)
        with torch.no_grad():
            change(folded.model)
        return folded

    monkeypatch.setattr(api, "fold_network", wrong)


@pytest.mark.parametrize("fold", ["exact", "poly"])
def test_a_wrong_fold_is_refused(fold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda net: net[0].weight.add_(0.3))
    with pytest.raises(RetrofitError, match=r"differs from the given (one|network) by"):
        retrofit.fold(network(), fold, input_size=(3, 6, 6), degree=6 if fold == "poly" else None)


def test_what_only_images_show_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda net: net.insert(0, Far()))
    retrofit.fold(network(), input_size=(3, 6, 6))
    with pytest.raises(RetrofitError, match="differs"):
        retrofit.fold(network(), input_size=(3, 6, 6), calibrate=[200 * torch.rand(2, 3, 6, 6)])


def test_each_output_by_its_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Features().eval()
    retrofit.fold(model, input_size=(3, 6, 6))
    broken(monkeypatch, lambda net: net.head.bias.add_(0.05))
    with pytest.raises(RetrofitError, match="differs"):
        retrofit.fold(model, input_size=(3, 6, 6))


def test_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, lambda net: net[0].weight.mul_(1.01))
    retrofit.fold(network(), input_size=(3, 6, 6), tolerance=0.2)
    with pytest.raises(RetrofitError, match=r"more than 0\.0001; .*raise `tolerance`"):
        retrofit.fold(network(), input_size=(3, 6, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_folded_as_float32(dtype: torch.dtype) -> None:
    model = network().to(dtype)
    folded = retrofit.fold(model, input_size=(3, 6, 6))
    assert {p.dtype for p in folded.parameters()} == {torch.float32}
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(folded(x), model.float()(x), atol=1e-5, rtol=1e-4)


def test_a_detector_is_compared_by_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    ).eval()
    retrofit.fold(model, input_size=(3, 64, 64))
    broken(monkeypatch, lambda net: net.backbone.features[0][0][0].weight.add_(0.3))
    with pytest.raises(RetrofitError, match="differs"):
        retrofit.fold(model, input_size=(3, 64, 64))


def test_zero_outputs_are_the_same_function() -> None:
    model = network()
    nn.init.zeros_(model[3].weight)
    nn.init.zeros_(model[3].bias)
    assert not retrofit.fold(model, input_size=(3, 6, 6))(torch.randn(1, 3, 6, 6)).any()


def test_random_draws_are_the_same_in_both() -> None:
    model = nn.Sequential(*network(), nn.Dropout(0.5))
    model[4].eval = lambda: model[4]  # type: ignore[assignment]  Monte-Carlo dropout
    model.train()
    retrofit.fold(model, input_size=(3, 6, 6))


@pytest.mark.parametrize(
    ("theirs", "share"),
    [
        ([[1.0, 2.0]], 0.0),
        ([[1.0, 2.2]], 0.1),
        ([[1.0, float("nan")]], float("inf")),
        ([[1.0, 2.0, 3.0]], float("inf")),
        ([[1.0, 2.0], [0.0, 0.0]], float("inf")),
    ],
)
def test_share(theirs: list[list[float]], share: float) -> None:
    check = Check([torch.zeros(1, 2)], [[torch.tensor([1.0, 2.0])]], 0.2)
    found = compare(lambda _: [torch.tensor(row) for row in theirs], check)
    assert found.share == pytest.approx(share)
    assert found.passed == (share <= 0.2)


def test_nothing_compared_is_not_passed() -> None:
    assert not compare(lambda _: [], Check([], [], 1.0)).passed
    assert not Parity((1,), 0.0, 0.0, None, 1.0).passed


def test_reference_leaves_the_network_as_it_was() -> None:
    model = network().train().half()
    (found,) = reference(model, [torch.randn(2, 3, 6, 6)])
    assert found[0].dtype == torch.float32
    assert model[0].weight.dtype == torch.float16
    assert all(module.training for module in model.modules())
    assert answer(model.eval().float(), torch.zeros(1, 3, 6, 6))[0].shape == (1, 4, 4, 4)
