"""Targets dbn and dbnn: the same function at strength 0, trained and stored at strength 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import SyncBatchNormAct
from torch import Tensor, nn

import retrofit
from retrofit.compare import Reference
from retrofit.inputs import example_calls
from retrofit.layers.decorrelated_batch_norm import DecorrelatedNorm
from retrofit.networks.manifest import read_manifest
from retrofit.surgery import Plan, apply, plan
from tests.surgery.test_contract import trained

TARGET = pytest.mark.parametrize("to", ["dbn", "dbnn"])


def train(model: nn.Module, side: int, steps: int = 2) -> list[float]:
    """Take optimizer steps on seeded pictures; return the losses. Running statistics become the last batch's."""
    for layer in filter_decorrelated(model):
        layer.momentum = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(3)
    losses = []
    model.train()
    for _ in range(steps):
        loss = nn.functional.cross_entropy(
            model(torch.randn(16, 3, side, side, generator=generator)), torch.arange(16) % 10
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def same_after_loading(model: nn.Module, path: Path, side: int) -> None:
    retrofit.save(model, path)
    loaded = retrofit.load(path)
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(x), model.eval()(x))


@TARGET
def test_a_network(to: str, tmp_path: Path) -> None:
    side = 64  # in smaller pictures the last groups have hardly more values than channels
    model = timm.create_model("test_resnet", num_classes=10)
    check = Reference(model, example_calls(model, None, (3, side, side)))
    model, report = retrofit.convert(model, to)
    assert report.plan.counts["unsupported"] == 0
    assert report.params_after == report.params_before
    assert check.compare(model).max_abs_diff == 0
    retrofit.set_strength(model, 1.0)
    assert check.compare(model).passed  # in evaluation the whitening starts as BatchNorm's scaling
    assert all(0 < loss < 100 for loss in train(model, side))
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        whitened = model.eval()(x)
        retrofit.set_strength(model, 0.0)
        assert (model(x) - whitened).abs().max() > 0.01 * whitened.abs().max() > 0
    retrofit.set_strength(model, 1.0)
    same_after_loading(model, tmp_path / "net.safetensors", side)


@TARGET
def test_options_are_stored_and_replayed(to: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"group_size": 8}
    options |= {"noise": 0.1, "alpha": 0.5} if to == "dbnn" else {}
    model, report = retrofit.convert(timm.create_model("test_resnet"), to, **options)
    path = tmp_path / "net.safetensors"
    retrofit.save(model, path)
    manifest = read_manifest(path)["conversion"]["steps"][0]
    assert {key: manifest["options"][key] for key in options} == options
    loaded = retrofit.load(path)
    for ours, theirs in zip(*(filter_decorrelated(net) for net in (model, loaded)), strict=True):
        assert theirs.group_size == 8
        assert vars(theirs).get("alpha") == vars(ours).get("alpha") == options.get("alpha")
    replayed, _ = apply(Plan.from_dict(report.plan.to_dict()), timm.create_model("test_resnet"))
    assert list(replayed.state_dict()) == list(model.state_dict())


def filter_decorrelated(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if isinstance(module, DecorrelatedNorm)]


def test_group_sizes_and_their_reasons() -> None:
    model = nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(24), nn.BatchNorm2d(7), nn.BatchNorm2d(13))
    assert [row.options["group_size"] for row in plan(model, "dbn").layers] == [16, 12, 7, 13]
    rows = plan(model, "dbn", group_size=4).layers
    assert [row.options["group_size"] for row in rows] == [4, 4, 1, 1]
    assert [bool(row.reason) for row in rows] == [False, False, True, True]


@TARGET
def test_layers_that_cannot_whiten_are_reported(to: str) -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(8), nn.BatchNorm2d(8, track_running_stats=False), nn.SyncBatchNorm(8), SyncBatchNormAct(8)
    ).append(nn.GroupNorm(2, 8))
    rows = plan(model, to, source=["bn", "gn"]).layers
    assert [row.status for row in rows] == ["converted", *["unsupported"] * 4]
    assert "running statistics" in rows[1].reason
    assert all("not synchronized" in row.reason for row in rows[2:4])
    assert "GroupNorm" in rows[4].reason


@TARGET
def test_meta_dtype_and_compile(to: str) -> None:
    with torch.device("meta"):
        meta = nn.Sequential(nn.BatchNorm2d(8))
    meta = retrofit.convert(meta, to)[0]
    assert all(t.is_meta for t in (*meta.parameters(), *meta.buffers()))
    model = retrofit.convert(nn.Sequential(trained(lambda: nn.BatchNorm2d(8))).to(torch.bfloat16), to)[0].eval()
    assert model[0].running_whitening.dtype == torch.bfloat16
    assert model[0].strength.dtype == torch.float32
    x: Tensor = torch.randn(3, 8, 4, 4, dtype=torch.bfloat16)
    assert model(x).dtype == torch.bfloat16
    retrofit.set_strength(model, 1.0)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch.compiler.reset()
