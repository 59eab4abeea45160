"""Targets dbn and dbnn: the same function at strength 0, trained and stored at strength 1."""

from __future__ import annotations

import timm
import torch
from torch import nn

import retrofit
from retrofit.surgery import plan
from tests.surgery.networks import trained


def test_the_whitening_starts_as_the_scaling_of_batch_norm() -> None:
    source, x = trained(timm.create_model("test_resnet")), torch.randn(2, 3, 64, 64)
    expected = source(x)
    model, report = retrofit.convert(source, "dbnn")
    assert report.params_after == report.params_before
    retrofit.set_strength(model, 1.0)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.train()(torch.randn(16, 3, 64, 64))
        whitened = model.eval()(x)
        retrofit.set_strength(model, 0.0)
        assert (model(x) - whitened).abs().max() > 0.01 * whitened.abs().max()


def test_group_sizes_and_their_reasons() -> None:
    model = nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(24), nn.BatchNorm2d(7), nn.BatchNorm2d(13))
    assert [row.options["group_size"] for row in plan(model, "dbn").layers] == [16, 12, 7, 13]
    rows = plan(model, "dbn", group_size=4).layers
    assert [row.options["group_size"] for row in rows] == [4, 4, 1, 1]
    assert [bool(row.reason) for row in rows] == [False, False, True, True]
