"""plan and apply: rules, aliases, unknown classes, errors; and `retrofit.convert`, whole or not at
all, checked.
"""

import copy
import dataclasses
import json
import re
from typing import Any

import pytest
import timm
import torch
from timm.layers import ConvNormAct, SyncBatchNormAct
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import retrofit
from retrofit import RetrofitError, UsageError
from retrofit.surgery import (
    Plan,
    apply,
    bypass_guards,
    converter_for,
    plan,
    set_strength,
    strength_of,
)
from retrofit.surgery.targets.batch_independent import BatchIndependentConverter
from tests.graph import blocks
from tests.surgery.networks import Shared, mixed, trained


def statuses(made: Plan) -> dict[str, str]:
    return {row.name: row.status for row in made.layers}


@pytest.mark.parametrize(
    ("to", "converted"),
    [
        ("bnn", {"1"}),
        ("lnn", {"5"}),
        ("gnn", {"3.0"}),
        ("inn", {"3.1"}),
        ("normal", {"1", "3.0", "3.1", "5"}),
    ],
)
def test_each_target_converts_its_own_family(to: str, converted: set[str]) -> None:
    made = plan(mixed(), to)
    assert {row.name for row in made.converted} == converted
    assert all(row.reason for row in made.layers if row.status != "converted")


@pytest.mark.parametrize("to", ["gn", "frozen", "dbn", "dbnn"])
def test_layers_that_cannot_be_converted_are_reported(to: str) -> None:
    without = nn.BatchNorm2d(8, track_running_stats=False)
    model = nn.Sequential(
        nn.BatchNorm2d(8), without, nn.GroupNorm(2, 8), nn.SyncBatchNorm(8), SyncBatchNormAct(8)
    )
    rows = plan(model, to).layers
    assert [row.status for row in rows[:3]] == ["converted", "unsupported", "kept"]
    assert "tracks no running statistics" in rows[1].reason
    assert rows[2].reason == f"GroupNorm is not a source of {to}"
    assert ["not synchronized" in row.reason for row in rows[3:]] == [to in ("dbn", "dbnn")] * 2


@pytest.mark.parametrize(
    ("to", "module", "advice"),
    [
        ("bnn", nn.LayerNorm(8), "; try `to='lnn'`"),
        ("inn", nn.BatchNorm2d(8), "; try `to='bnn'`"),
        ("ln", nn.LayerNorm(8), ""),  # it is one
        ("frozen", nn.LayerNorm(8), ""),  # it has no statistics to freeze
        ("lnn", nn.Sequential(nn.LayerNorm(8), FrozenBatchNorm2d(8)), ""),
    ],
)
def test_another_target_is_advised_if_it_does_the_same_to_the_layer(
    to: str, module: nn.Module, advice: str
) -> None:
    rows = plan(nn.Sequential(nn.BatchNorm2d(8), nn.InstanceNorm2d(8), module), to).layers
    assert rows[-1].status == "kept"
    assert rows[-1].reason.partition(f" is not a source of {to}")[2] == advice


def test_group_sizes_and_their_reasons() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(64), nn.BatchNorm2d(24), nn.BatchNorm2d(7), nn.BatchNorm2d(13)
    )
    assert [row.options["group_size"] for row in plan(model, "dbn").layers] == [16, 12, 7, 13]
    rows = plan(model, "dbn", group_size=4).layers
    assert [row.options["group_size"] for row in rows] == [4, 4, 1, 1]
    assert [bool(row.reason) for row in rows] == [False, False, True, True]


def test_source_narrows_the_families_of_a_target() -> None:
    reasons = " ".join(row.reason for row in plan(mixed(), "normal", source="ln").layers)
    assert set(re.findall(r"'(\S+)' is not named in `source`", reasons)) == {"bn", "gn", "in"}
    assert statuses(plan(mixed(), "normal", source=["ln", "bn"]))["1"] == "converted"


def resnet18() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("resnet18")


def test_patterns_that_can_be_read_once_are_recorded() -> None:
    made = plan(resnet18(), "bnn", only=(name for name in [r"^layer1\."]))
    assert made.options["only"] == [r"^layer1\."]
    assert all(row.name.startswith("layer1.") for row in made.converted)


def test_compiled_patterns_are_recorded_as_text() -> None:
    compiled = re.compile(r"^layer1\.")
    made = plan(resnet18(), "bnn", only=[compiled], skip=[re.compile("bn2")])
    assert made.options["only"] == [compiled.pattern]
    assert made.options["skip"] == ["bn2"]
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_only_and_skip() -> None:
    made = plan(resnet18(), "bnn", only=r"^layer[12]\.", skip=[r"\.bn2$", "downsample"])
    assert [row.name for row in made.converted] == [
        "layer1.0.bn1",
        "layer1.1.bn1",
        "layer2.0.bn1",
        "layer2.1.bn1",
    ]
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
    ({"source": "xn"}, UsageError, "no family that bnn converts; choose from bn"),
    ({"to": "lnn"}, RetrofitError, "20 BatchNorm2d.*try .to='bnn'.; other targets .*gn-pn, dbn"),
    ({"to": "lnn", "source": "bn"}, UsageError, "no family that lnn converts; choose from ln"),
    ({"skip": "."}, RetrofitError, "nothing to convert"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_arguments(
    arguments: dict[str, Any], error: type[RetrofitError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        plan(resnet18(), **{"to": "bnn", **arguments})
    assert "\n" not in str(caught.value)


def test_a_container_that_is_named_after_what_it_holds_is_no_layer() -> None:
    assert statuses(plan(nn.Sequential(ConvNormAct(3, 8)), "bnn")) == {"0.bn": "converted"}


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
    model, report = retrofit.convert(model, "bnn")
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
        apply(plan(timm.create_model("test_resnet"), "bnn"), timm.create_model("test_efficientnet"))
    for made_for, other in (
        (blocks.NormTwice(), blocks.TwoConsumers()),
        (blocks.Shared(), blocks.TwoConsumers()),
    ):
        with pytest.raises(RetrofitError, match="another model: here no activation follows bn1"):
            apply(plan(made_for, "gn-pn"), other)


def test_a_plan_for_a_layer_that_is_not_there_is_refused_whatever_its_class_is_called() -> None:
    model = mixed()
    made = plan(model, "bnn")
    gone = dataclasses.replace(made.layers[0], name="gone", source="absent")
    made = dataclasses.replace(made, layers=(*made.layers, gone))
    with pytest.raises(RetrofitError, match="another model: 'gone' is absent in the plan"):
        apply(made, model)


class Net(
    nn.Sequential
):  # it counts its calls in a buffer, in evaluation too, and draws random numbers
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        for layer in self:
            x = layer(x)
        return x + torch.rand(1).to(x)


def state(model: nn.Module) -> list[Any]:
    """All that can be seen of a network: tensors by identity and value, classes, attributes, flags,
    hooks.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    modules = [
        (m, type(m), m.training, sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()
    ]
    return [*((name, id(tensor), tensor.tolist()) for name, tensor in tensors), *modules]


def test_the_check_is_in_the_report_and_disturbs_nothing() -> None:
    model = Net().train()
    model[3].eval()
    random, flags = torch.get_rng_state(), [module.training for module in model.modules()]
    buffers = {name: (t.clone(), t._version) for name, t in model.named_buffers()}
    model, report = retrofit.convert(model, "ln")
    assert report.check.passed
    assert report.to_dict()["check"]["passed"]
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    for name, (value, version) in buffers.items():
        assert torch.equal(model.get_buffer(name), value)
        assert (
            name == "calls" or model.get_buffer(name)._version == version
        )  # what nothing wrote to is left alone
    assert not any(module._forward_hooks for module in model.modules())
    assert retrofit.convert(Net(), "ln", check=False)[1].check is None


def test_where_it_cannot_run_it_says_so() -> None:
    for model, reason in (
        (
            nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)),
            "did not take a random input of size 3x224x224",
        ),
        (Net().bfloat16(), "half precision"),
        (Net().to("meta"), "meta device"),
    ):
        _, report = retrofit.convert(model, "bnn")
        assert report.check is None
        assert any(note.startswith("not checked: ") and reason in note for note in report.notes)
        assert any(isinstance(module, retrofit.layers.StrengthMixin) for module in model.modules())


def test_an_input_size_that_is_given_counts() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    assert retrofit.convert(copy.deepcopy(model), "bnn", input_size=(5,))[1].check is not None
    before = state(model)
    # No tensor has the second size.
    for size in (7, -7):
        with pytest.raises(RetrofitError, match=f"did not take a random input of size {size}"):
            retrofit.convert(model, "bnn", input_size=(size,))
    assert state(model) == before


def test_a_conversion_that_changes_the_function_is_refused_and_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shifted(*args: Any) -> nn.Module:
        new: Any = build(*args)
        new.bias = nn.Parameter(new.bias + 0.5)
        return new

    model = timm.create_model("test_resnet").eval()
    before, build = state(model), BatchIndependentConverter.build
    monkeypatch.setattr(BatchIndependentConverter, "build", shifted)
    with pytest.raises(RetrofitError, match=r"not the function of its source.*largest difference"):
        retrofit.convert(model, "gn")
    assert state(model) == before


@pytest.mark.parametrize(
    ("to", "error"), [("gn-pn", KeyboardInterrupt), ("evonorm-s0", RuntimeError)]
)
def test_a_failure_anywhere_leaves_the_network_as_it_was(
    to: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error("stop")

    made = plan(Shared(), to)
    converter = type(converter_for(to))
    built = converter.build

    def second(self: Any, module: Any, row: Any, device: Any) -> nn.Module:
        return fail() if row.name == "bn2" else built(self, module, row, device)  # type: ignore[func-returns-value]

    for holder, name, function in (
        *((converter, "build", second), (converter, "finish", fail)),
        (bypass_guards, "refuse_fusing", fail),
    ):
        model = trained(Shared())
        before = state(model)
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, function)
            with pytest.raises(error, match="stop"):
                apply(made, model)
        assert state(model) == before
        retrofit.convert(model, to)  # and it still converts


@pytest.mark.parametrize("thing", ["resnet50", None, nn.BatchNorm2d], ids=str)
def test_what_is_no_network_is_refused(thing: Any) -> None:
    with pytest.raises(
        retrofit.UsageError,
        match=r"a torch.nn.Module is converted, not .*; build the network first",
    ):
        retrofit.convert(thing, "bnn")


@pytest.mark.parametrize(
    ("options", "noises", "others"),
    [
        ({}, [0.0] * 4, ("scaled", 1.0)),
        ({"noise": "paper"}, [0.4, 0.4, 0.4, 1.0], ("scaled", 1.0)),
        ({"noise": 0.2, "noise_kind": "unscaled", "alpha": 0.5}, [0.2] * 4, ("unscaled", 0.5)),
    ],
)
def test_every_layer_gets_the_options_or_the_papers_without_the_noise(
    options: dict[str, Any], noises: list[float], others: tuple[str, float]
) -> None:
    model, report = retrofit.convert(mixed(), "normal", **options)
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, retrofit.layers.NormalityMixin)
    ]
    assert [layer.noise for layer in layers] == noises
    assert all((layer.noise_kind, layer.alpha) == others for layer in layers)
    settled = {"noise": 0.0} | {name: value for name, value in options.items() if value != "paper"}
    assert all(
        row.options == ({} if options == {"noise": "paper"} else settled)
        for row in report.plan.layers
    )
    assert report.plan.options.items() >= options.items()


def test_an_attribute_of_the_source_becomes_no_option() -> None:
    for to, expected in (("bnn", (1, 0, 0)), ("frozen", (0.5, 3, 1))):
        source: Any = nn.BatchNorm2d(4)
        source.alpha, source.noise, source.strength = 0.5, 3.0, 1.0  # somebody's own
        layer: Any = retrofit.convert(nn.Sequential(source), to, input_size=(4, 8, 8))[0][0]
        assert (layer.alpha, layer.noise, float(layer.strength)) == expected


def test_a_report_prints_as_a_small_table() -> None:
    _, report = retrofit.convert(timm.create_model("resnet18"), "gn-pn", skip="layer4", check=False)
    lines = str(report).splitlines()
    assert (
        lines[0]
        == str(report.plan).splitlines()[0]
        == "to gn-pn: 15 converted, 5 kept, 0 unsupported"
    )
    assert lines[1].split() == ["count", "found", "becomes", "first", "why"]
    assert len(lines) < 16
    assert max(map(len, lines[:-3])) < 170
    assert any(
        line.split()[:4] == ["15", "BatchNorm2d", "MigratedGroupNorm", "bn1"] for line in lines
    )
    assert "strength: 0" in lines
    assert any(line.startswith("note: 7 of 17 activations are converted") for line in lines)
    assert "<b>\\x1b" in str(plan(nn.ModuleDict({"<b>\x1b[31m": nn.BatchNorm2d(3)}), "bnn"))


def test_a_report_names_the_options_that_were_given() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    control = retrofit.plan(network, "bnn", noise=0.4, alpha=0.0, only="1")
    assert str(control).startswith("to bnn (noise=0.4, alpha=0.0): 1 converted")
    assert str(retrofit.plan(network, "bnn")).startswith("to bnn: 1 converted")
