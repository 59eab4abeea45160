"""Targets dbn and dbnn: the same function at strength 0, trained and stored at strength 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision.models as tv
from timm.layers import BatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn

import retrofit
from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.strength_schedule import StrengthSchedule
from retrofit.layers.decorrelated_batch_norm import DecorrelatedNorm
from retrofit.layers.lambdas import lambda_values
from retrofit.networks.artifact import read_manifest
from retrofit.surgery import Plan, apply, plan
from retrofit.surgery.families import find_norms
from retrofit.surgery.identity_check import IdentityCheck
from tests.layers.cases import assert_same_gradient
from tests.surgery.test_contract import reference, trained

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "test_resnet": lambda: timm.create_model("test_resnet", num_classes=10),
    "resnet18": lambda: timm.create_model("resnet18", num_classes=10),
    "tv:resnet50": lambda: tv.resnet50(num_classes=10),
    "tf_efficientnet_lite0": lambda: timm.create_model("tf_efficientnet_lite0", num_classes=10),
}
SOURCES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "1d": (lambda: nn.BatchNorm1d(24, eps=1e-3, momentum=0.3), (9, 24, 5), "1d"),
    "2d": (lambda: nn.BatchNorm2d(24, momentum=None), (5, 24, 5, 4), "2d"),
    "2d plain": (lambda: nn.BatchNorm2d(24, affine=False), (5, 24, 5, 4), "2d"),
    "2d no bias": (lambda: nn.BatchNorm2d(24, bias=False), (5, 24, 5, 4), "2d"),
    "3d": (lambda: nn.BatchNorm3d(24), (4, 24, 3, 4, 2), "3d"),
    "act": (
        lambda: BatchNormAct2d(24, act_layer=nn.SiLU, drop_layer=nn.Dropout2d, inplace=False),
        (5, 24, 5, 4),
        "Act2d",
    ),
}
TARGET = pytest.mark.parametrize("to", ["dbn", "dbnn"])
PREFIX = {"dbn": "DecorrelatedBatchNorm", "dbnn": "DecorrelatedBatchNormalNorm"}


def quiet(to: str) -> dict[str, Any]:
    return {"noise": 0.0} if to == "dbnn" else {}


@TARGET
@pytest.mark.parametrize("case", SOURCES)
def test_each_layer_keeps_function_tensors_and_settings(to: str, case: str) -> None:
    build, shape, suffix = SOURCES[case]
    source = trained(build)
    expected = reference(source)
    held = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    model, report = retrofit.convert(nn.Sequential(source), to, **quiet(to))
    (new,), (row,) = model, report.plan.layers
    assert type(new).__name__ == f"{PREFIX[to]}{suffix}"
    assert row.reason == "whitened 12 channels at a time: 16 do not divide 24 channels"
    assert new.group_size == 12
    for name, tensor in held.items():
        assert dict((*new.named_parameters(), *new.named_buffers()))[name] is tensor
    added = {"strength", "running_covariance", "running_whitening", "setting_whitening", "setting_iterations"}
    added |= {"running_lambda", "setting_alpha", "setting_steps"} if to == "dbnn" else set()
    assert set(new.state_dict()) - set(source.state_dict()) == added
    for attribute in ("eps", "momentum", "affine", "act", "drop"):
        if hasattr(source, attribute):
            assert getattr(new, attribute) == getattr(source, attribute)
    for training in (False, True, False):
        model.train(training)
        expected.train(training)
        x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
        torch.manual_seed(2)
        out = model(x)
        torch.manual_seed(2)
        reference_out = expected(y)
        torch.testing.assert_close(out, reference_out, rtol=1e-5, atol=5e-6)
        assert_same_gradient(out, x, reference_out, y, 1e-4, 1e-5)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(new.state_dict()[key], value, rtol=1e-5, atol=1e-5)


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
@pytest.mark.parametrize(
    "name", ["test_resnet", *(pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS if n != "test_resnet")]
)
def test_networks(to: str, name: str, tmp_path: Path) -> None:
    side = 64  # in smaller pictures the last groups have hardly more values than channels
    model = NETWORKS[name]()
    check = IdentityCheck(model, (3, side, side))
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


@TARGET
def test_strength_schedule_norms_and_lambdas(to: str) -> None:
    model, _ = retrofit.convert(timm.create_model("test_resnet"), to)
    assert {row.status for row in find_norms(model)} == {"kept"}
    assert {row.reason for row in find_norms(model)} == {"already converted"}
    schedule = StrengthSchedule(model, 4, ramp=1.0)
    schedule.step()
    assert {float(layer.strength) for layer in filter_decorrelated(model)} == {0.25}
    model(torch.randn(4, 3, 32, 32).exp())
    lambdas = lambda_values(model.eval())
    assert len(lambdas) == (len(filter_decorrelated(model)) if to == "dbnn" else 0)
    assert all(values.std() > 0 for values in lambdas.values())
    with pytest.raises(RetrofitError, match="nothing to convert"):
        plan(model, to)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "dbn", "groups": 4}, "use `group_size`, "),
        ({"to": "dbnn", "groups": "auto"}, "use `group_size`, "),
        ({"to": "dbn", "group_size": 0}, "`group_size` must be at least 1"),
        ({"to": "dbn", "noise": 0.4}, "`noise` means nothing"),
        ({"to": "dbnn", "noise": -1.0}, "`noise` must be"),
        ({"to": "dbnn", "ws": True}, "`ws` means nothing"),
        ({"to": "bnn", "group_size": 4}, "`group_size` means nothing"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], message: str) -> None:
    model = timm.create_model("test_resnet")
    with pytest.raises(UsageError, match=message):
        retrofit.convert(model, **arguments)
    assert not filter_decorrelated(model)


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
