"""plan, apply and what surrounds the layers: rules, aliases, unknown classes, fusing blocks, errors."""

import copy
import json
import re
from typing import Any

import pytest
import timm
import torch
from torch import nn

import retrofit
from retrofit import RetrofitError, UsageError
from retrofit.record import record_of
from retrofit.surgery import TARGETS, Plan, apply, plan, set_strength, strength_of


def mixed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Sequential(nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)),
        nn.Flatten(2),
        nn.LayerNorm(36),
    )


def statuses(made: Plan) -> dict[str, str]:
    return {row.name: row.status for row in made.layers}


@pytest.mark.parametrize(
    ("to", "converted"),
    [("bnn", {"1"}), ("lnn", {"5"}), ("gnn", {"3.0"}), ("inn", {"3.1"}), ("normal", {"1", "3.0", "3.1", "5"})],
)
def test_each_target_converts_its_own_family(to: str, converted: set[str]) -> None:
    model = mixed()
    before = copy.deepcopy(model.state_dict())
    made = plan(model, to)
    assert {name for name, status in statuses(made).items() if status == "converted"} == converted
    assert all(row.reason for row in made.layers if row.status != "converted")
    assert str(model.state_dict().keys()) == str(before.keys()), "planning must change nothing"


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("family", ["bn", "ln", "gn", "in"])
def test_what_a_hint_says_works(to: str, family: str) -> None:
    try:
        said = " ".join(row.reason for row in plan(mixed(), to, source=family).layers)
    except RetrofitError as error:
        said = str(error)
    hints = set(re.findall(r"name '(\S+)' in `source` too", said))
    assert hints or to != "normal"
    for other in hints:
        row = {"bn": "1", "gn": "3.0", "in": "3.1", "ln": "5"}[other]
        if to.endswith("-pn") and other == "gn":  # whose activations are converted, of which there is none here
            continue
        assert statuses(plan(mixed(), to, source=[family, other]))[row] == "converted"


def test_source_that_has_no_path_is_unsupported_with_a_reason() -> None:
    made = plan(mixed(), "bnn", source=["bn", "ln"])
    assert statuses(made)["5"] == "unsupported"
    assert "normal" in next(row.reason for row in made.layers if row.name == "5")


def test_only_and_skip() -> None:
    model = timm.create_model("resnet18")
    made = plan(model, only=r"^layer[12]\.", skip=[r"\.bn2$", "downsample"])
    converted = {n for n, s in statuses(made).items() if s == "converted"}
    assert converted == {"layer1.0.bn1", "layer1.1.bn1", "layer2.0.bn1", "layer2.1.bn1"}
    assert len(made.layers) == 20
    reasons = {row.name: row.reason for row in made.layers}
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
    ({"groups": 8}, UsageError, "groups"),
    ({"noise": -1.0}, UsageError, "noise"),
    ({"noise": float("nan")}, UsageError, "noise"),
    ({"skip": "."}, RetrofitError, "nothing to convert"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_arguments(arguments: dict[str, Any], error: type[RetrofitError], message: str) -> None:
    model = timm.create_model("resnet18")
    keys = set(model.state_dict())
    with pytest.raises(error, match=message) as caught:
        retrofit.convert(model, **{"to": "bnn", **arguments})
    assert "\n" not in str(caught.value)
    assert set(model.state_dict()) == keys


def test_a_model_without_norms_says_so() -> None:
    with pytest.raises(RetrofitError, match="no normalization layer at all"):
        plan(nn.Sequential(nn.Conv2d(3, 3, 1)))


class LoudNorm(nn.BatchNorm2d):
    """A subclass that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class HomemadeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))


class ConvNorm(nn.Sequential):
    """A container named after what it holds."""


def test_unknown_classes_are_reported_not_treated_as_their_parent() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(8), LoudNorm(8), HomemadeNorm(), ConvNorm(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    )
    rows = {row.name: row for row in plan(model).layers}
    assert rows["0"].status == rows["3.1"].status == "converted"
    assert rows["1"].status == rows["2"].status == "unsupported"
    assert "derived from BatchNorm, and another function" in rows["1"].reason
    assert "HomemadeNorm" in rows["2"].reason
    assert "3" not in rows
    retrofit.convert(model)
    assert type(model[1]) is LoudNorm


def test_fused_children_and_a_module_called_twice_survive() -> None:
    model = timm.create_model("test_efficientnet").eval()
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    acts = [type(m.act) for m in model.modules() if type(m).__name__ == "BatchNormAct2d"]
    retrofit.convert(model)
    assert [type(m.act) for m in model.modules() if type(m).__name__ == "BatchNormalNormAct2d"] == acts
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "levit_128s",
        "fastvit_t8",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("repvit_m0_9", "mobileone_s0", "ghostnetv3_050")),
    ],
)
def test_blocks_that_fuse_refuse_instead_of_dropping_the_transform(name: str) -> None:
    model = timm.create_model(name).eval()
    model, report = retrofit.convert(model)
    assert any("re-parameterise" in note for note in report.notes)
    with pytest.raises(RetrofitError, match="re-parameterise before converting"):
        timm.utils.reparameterize_model(model, inplace=True)
    with pytest.raises(RetrofitError):
        timm.utils.reparameterize_model(copy.deepcopy(model), inplace=True)


def test_what_a_model_can_still_do(tmp_path: Any) -> None:
    model = timm.create_model("test_resnet", num_classes=7)
    retrofit.convert(model)
    assert model.forward_features(torch.randn(1, 3, 64, 64)).shape == (1, 96, 2, 2)
    model.reset_classifier(3)
    compiled = torch.compile(copy.deepcopy(model).eval(), fullgraph=True, backend="eager")
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(compiled(x), model.eval()(x))
    torch.save(model, tmp_path / "whole.bin")
    again = torch.load(tmp_path / "whole.bin", weights_only=False)
    assert torch.equal(again(x), model(x))


def test_an_optimizer_built_before_conversion_keeps_working() -> None:
    model = timm.create_model("test_resnet", num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    retrofit.convert(model)
    weight = model.get_parameter("bn1.weight")
    before = weight.detach().clone()
    model(torch.randn(4, 3, 64, 64)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)


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
    made = plan(timm.create_model("test_resnet"), noise=0.1, skip="downsample")
    again = Plan.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    model, report = apply(again, timm.create_model("test_resnet"))
    assert model.bn1.noise == 0.1
    assert report.plan.counts == made.counts


def test_a_plan_for_another_model_is_refused_and_nothing_changes() -> None:
    made = plan(timm.create_model("test_resnet"))
    model = timm.create_model("test_efficientnet")
    keys = set(model.state_dict())
    with pytest.raises(RetrofitError, match="another model"):
        apply(made, model)
    assert set(model.state_dict()) == keys


def test_conversions_follow_one_another() -> None:
    model = mixed()
    x = torch.randn(2, 3, 8, 8)
    expected = model.eval()(x)
    for to in ("bnn", "lnn", "normal"):
        retrofit.convert(model, to)
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert [p.to for p in record_of(model).plans] == ["bnn", "lnn", "normal"]
    with pytest.raises(RetrofitError, match="already converted"):
        retrofit.convert(model, "normal")


def test_report_json_has_the_settled_fields() -> None:
    _, report = retrofit.convert(timm.create_model("test_resnet"))
    values = json.loads(json.dumps(report.to_dict()))
    assert {"to", "layers", "counts", "params", "strength"} <= set(values)
    assert set(values["layers"][0]) == {"name", "source", "target", "status", "reason"}
    assert values["params"]["before"] == values["params"]["after"]
