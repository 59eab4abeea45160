"""The paper's ablations as options of a conversion: into the layers and the artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import retrofit

OPTIONS: dict[str, Any] = {"noise": 0.2, "noise_kind": "unscaled", "alpha": 0.5}


def mixed() -> nn.Module:
    from timm.layers import BatchNormAct2d

    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), BatchNormAct2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8),
        nn.Flatten(), nn.LayerNorm(8 * 4 * 4),
    )  # fmt: skip


def settings(layer: Any) -> dict[str, Any]:
    return {"noise": layer.noise, "noise_kind": layer.noise_kind, "alpha": layer.alpha}


def test_every_layer_gets_them() -> None:
    model, report = retrofit.convert(mixed(), "normal", **OPTIONS)
    converted = [module for module in model.modules() if isinstance(module, retrofit.layers.NormalityMixin)]
    assert len(converted) == 5
    assert all(settings(layer) == OPTIONS for layer in converted)
    assert report.plan.options.items() >= OPTIONS.items()


@pytest.mark.parametrize(("asked", "noises"), [(None, [0.0] * 5), ("paper", [0.4, 0.4, 0.4, 0.4, 1.0])])
def test_left_out_they_are_the_papers_but_for_the_noise(asked: str | None, noises: list[float]) -> None:
    model, report = retrofit.convert(mixed(), "normal", noise=asked)
    for row, noise in zip((1, 2, 3, 4, 6), noises, strict=True):
        assert settings(model[row]) == {"noise": noise, "noise_kind": "scaled", "alpha": 1.0}
    assert all(row.options == ({} if asked else {"noise": 0.0}) for row in report.plan.layers)


def test_an_artifact_keeps_them(tmp_path: Path) -> None:
    model, _ = retrofit.convert(timm.create_model("test_resnet"), "bnn", **OPTIONS)
    retrofit.set_strength(model, 1.0)
    model(torch.randn(2, 3, 64, 64).exp())
    retrofit.save(model, tmp_path / "a.safetensors")
    loaded = retrofit.load(tmp_path / "a.safetensors").eval()
    assert settings(loaded.bn1) == OPTIONS
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(x), model.eval()(x))
