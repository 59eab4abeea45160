"""plan, apply and what surrounds the layers: rules, aliases, unknown classes, fusing blocks, errors."""

import json
import re
from typing import Any

import pytest
import timm
import torch
from timm.layers import ConvNormAct, SyncBatchNormAct
from torch import nn

import retrofit
from retrofit import RetrofitError, UsageError
from retrofit.surgery import Plan, apply, plan, set_strength, strength_of
from tests.graph import blocks
from tests.surgery.networks import mixed


def statuses(made: Plan) -> dict[str, str]:
    return {row.name: row.status for row in made.layers}


@pytest.mark.parametrize(
    ("to", "converted"),
    [("bnn", {"1"}), ("lnn", {"5"}), ("gnn", {"3.0"}), ("inn", {"3.1"}), ("normal", {"1", "3.0", "3.1", "5"})],
)
def test_each_target_converts_its_own_family(to: str, converted: set[str]) -> None:
    made = plan(mixed(), to)
    assert {row.name for row in made.converted} == converted
    assert all(row.reason for row in made.layers if row.status != "converted")


@pytest.mark.parametrize("to", ["gn", "frozen", "dbn", "dbnn"])
def test_layers_that_cannot_be_converted_are_reported(to: str) -> None:
    without = nn.BatchNorm2d(8, track_running_stats=False)
    model = nn.Sequential(nn.BatchNorm2d(8), without, nn.GroupNorm(2, 8), nn.SyncBatchNorm(8), SyncBatchNormAct(8))
    rows = plan(model, to, source=["bn", "gn"]).layers
    assert [row.status for row in rows[:3]] == ["converted", "unsupported", "unsupported"]
    assert "tracks no running statistics" in rows[1].reason
    assert "GroupNorm" in rows[2].reason
    assert ["not synchronized" in row.reason for row in rows[3:]] == [to in ("dbn", "dbnn")] * 2


def test_group_sizes_and_their_reasons() -> None:
    model = nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(24), nn.BatchNorm2d(7), nn.BatchNorm2d(13))
    assert [row.options["group_size"] for row in plan(model, "dbn").layers] == [16, 12, 7, 13]
    rows = plan(model, "dbn", group_size=4).layers
    assert [row.options["group_size"] for row in rows] == [4, 4, 1, 1]
    assert [bool(row.reason) for row in rows] == [False, False, True, True]


def test_what_a_hint_says_works() -> None:
    reasons = " ".join(row.reason for row in plan(mixed(), "normal", source="ln").layers)
    assert set(re.findall(r"name '(\S+)' in `source` too", reasons)) == {"bn", "gn", "in"}
    assert statuses(plan(mixed(), "normal", source=["ln", "bn"]))["1"] == "converted"


def resnet18() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("resnet18")


def test_only_and_skip() -> None:
    made = plan(resnet18(), only=r"^layer[12]\.", skip=[r"\.bn2$", "downsample"])
    assert [row.name for row in made.converted] == ["layer1.0.bn1", "layer1.1.bn1", "layer2.0.bn1", "layer2.1.bn1"]
    reasons = {row.name: row.reason for row in made.layers}
    assert len(reasons) == 20
    assert "`only`" in reasons["bn1"]
    assert r"\.bn2$" in reasons["layer1.0.bn2"]


WRONG: list[tuple[dict[str, Any], type[RetrofitError], str]] = [
    ({"to": "bnm"}, UsageError, "bnn"),
    ({"only": "nowhere"}, RetrofitError, "nowhere.*matches none"),
    ({"skip": "nowhere"}, RetrofitError, "nowhere.*matches none"),
    ({"only": "("}, UsageError, "not a regular expression"),
    ({"skip": ["layer1", "*"]}, UsageError, "not a regular expression"),
    ({"source": "xn"}, UsageError, "bn, ln, gn, in"),
    ({"to": "lnn"}, RetrofitError, "20 BatchNorm2d.*try .to='bnn'."),
    ({"skip": "."}, RetrofitError, "nothing to convert"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_arguments(arguments: dict[str, Any], error: type[RetrofitError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        plan(resnet18(), **{"to": "bnn", **arguments})
    assert "\n" not in str(caught.value)


def test_a_container_that_is_named_after_what_it_holds_is_no_layer() -> None:
    assert statuses(plan(nn.Sequential(ConvNormAct(3, 8)))) == {"0.bn": "converted"}


def test_a_model_keeps_its_class_and_methods(tmp_path: Any) -> None:
    model = timm.create_model("densenet121", num_classes=7, growth_rate=8, block_config=(2, 2))
    retrofit.convert(model, "gn-pn", check=False)
    model.reset_classifier(3)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.eval().forward_head(model.forward_features(x)), model(x))
    assert type(model).__name__ == "DenseNet"
    torch.save(model, tmp_path / "whole.bin")
    assert torch.equal(torch.load(tmp_path / "whole.bin", weights_only=False)(x), model(x))


def test_strength() -> None:
    model = timm.create_model("test_resnet")
    with pytest.raises(RetrofitError, match="convert it first"):
        set_strength(model, 0.5)
    model, report = retrofit.convert(model)
    assert report.strength == strength_of(model) == 0.0
    set_strength(model, 0.25)
    assert strength_of(model) == 0.25
    with pytest.raises(UsageError, match=r"\[0, 1\]"):
        set_strength(model, 1.01)
    next(m for m in model.modules() if hasattr(m, "strength")).set_strength(1.0)
    with pytest.raises(RetrofitError, match="differ in strength"):
        strength_of(model)


def test_plan_survives_json_and_replays() -> None:
    options: dict[str, Any] = {"group_size": 8, "noise": 0.1, "alpha": 0.5}
    made = plan(timm.create_model("test_resnet"), "dbnn", **options, skip="downsample")
    again = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    model, report = apply(again, timm.create_model("test_resnet"))
    assert {name: getattr(model.bn1, name) for name in options} == options
    assert report.plan.counts == made.counts
    values = json.loads(json.dumps(report.to_dict()))
    assert {"to", "layers", "counts", "params", "strength"} <= set(values)
    assert set(values["layers"][0]) == {"name", "source", "target", "status", "reason"}
    assert values["params"]["before"] == values["params"]["after"]


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(RetrofitError, match="another model"):
        apply(plan(timm.create_model("test_resnet")), timm.create_model("test_efficientnet"))
    for made_for, other in ((blocks.NormTwice(), blocks.TwoConsumers()), (blocks.Shared(), blocks.TwoConsumers())):
        with pytest.raises(RetrofitError, match="another model: here no activation follows bn1"):
            apply(plan(made_for, "gn-pn"), other)
