"""BatchNorm to the constant affine of its running statistics, and frozen BatchNorm as a source of
other targets.
"""

from pathlib import Path

import pytest
import timm
import torch
from timm.layers import freeze_batch_norm_2d
from timm.layers.norm_act import FrozenBatchNormAct2d
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

import retrofit
from retrofit import RetrofitError
from retrofit.surgery import plan, strength_of
from tests.surgery.networks import trained


@pytest.mark.parametrize("to", ["ln-pn", "frozen"])
def test_frozen_layers_are_a_source(to: str) -> None:
    norms = FrozenBatchNorm2d(8, eps=1e-3), FrozenBatchNormAct2d(16, act_layer=nn.SiLU)
    model = trained(
        nn.Sequential(nn.Conv2d(3, 8, 3), norms[0], nn.ReLU(), nn.Conv2d(8, 16, 3), norms[1])
    )
    x = torch.randn(2, 3, 24, 24)
    expected = model(x)
    model, report = retrofit.convert(model, to)
    assert report.plan.counts == {"converted": 2, "kept": 0, "unsupported": 0}
    assert any(
        "2 frozen layers were constants and are parameters now" in note for note in report.notes
    )
    assert sum(row.status == "converted" for row in report.plan.edits) == (2 if "pn" in to else 0)
    assert {"1.weight", "1.bias", "4.weight", "4.bias"} <= dict(model.named_parameters()).keys()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_frozen_network_of_the_library_through_everything(tmp_path: Path) -> None:
    model = freeze_batch_norm_2d(trained(timm.create_model("test_resnet")))
    with pytest.raises(
        RetrofitError, match=r"15 FrozenBatchNorm2d.*convert what it holds: .*frozen"
    ):
        plan(model, "bnn")
    source = trained(timm.create_model("test_resnet"))
    x = torch.randn(2, 3, 64, 64)
    expected = source(x)
    model, _ = retrofit.convert(source, "frozen")
    retrofit.save(model, tmp_path / "a.safetensors")
    loaded = retrofit.load(tmp_path / "a.safetensors")
    torch.testing.assert_close(loaded.train()(x), expected, rtol=1e-4, atol=1e-5)
    assert strength_of(loaded) is None
    with pytest.raises(RetrofitError, match="no converted layer that has a strength"):
        retrofit.set_strength(loaded, 1.0)
    with pytest.raises(RetrofitError, match="already converted"):
        retrofit.convert(loaded, "frozen")
    again, report = retrofit.convert(loaded, "ln")  # what is frozen holds all that ln migrates
    assert report.plan.counts["converted"] == 15
    torch.testing.assert_close(again.eval()(x), expected, rtol=1e-4, atol=1e-5)
