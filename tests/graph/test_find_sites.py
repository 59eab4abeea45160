"""Norm and activation sites: against what a real forward does, and case by case."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.layers import BatchNormAct2d, GroupNormAct
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

import retrofit
from retrofit.graph.find_sites import find_sites
from retrofit.graph.site import Site, Sites
from retrofit.surgery import converter
from retrofit.surgery.execute import apply
from tests.graph import blocks

tv = torchvision.models


def is_bn(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def sites(model: nn.Module) -> dict[str, Site]:
    return {site.norm + (f"@{site.place}" if site.place else ""): site for site in find_sites(model, is_bn).sites}


def kinds_of(found: Sites) -> Counter[str]:
    return Counter(site.activation.kind if site.activation else "none" for site in found.sites)


ACTIVATIONS = {"relu", "relu_", "relu6", "silu", "hardswish", "hardtanh", "leaky_relu", "gelu"}
IGNORED = {"__get__", "dropout", "size", "dim", "_has_torch_function_unary", "feature_dropout"}


class Consumers(TorchFunctionMode):
    """Notes which functions take each norm's output, in a real run; nothing works in place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.outputs: dict[int, tuple[str, Tensor]] = {}
        self.found: dict[str, list[str]] = defaultdict(list)
        for name, module in model.named_modules():
            if is_bn(module):
                module.register_forward_hook(lambda _m, _i, out, name=name: self.outputs.update({id(out): (name, out)}))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "inplace" in kwargs:
            kwargs["inplace"] = False
        flat = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        for arg in flat:
            name, _ = self.outputs.get(id(arg), ("", None))
            if name and func.__name__ not in IGNORED:
                self.found[name].append(func.__name__)
        return func(*args, **kwargs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: timm.create_model("resnet18"),
    "dla34": lambda: timm.create_model("dla34"),
    "regnetx_002": lambda: timm.create_model("regnetx_002"),
    "tv:resnet18": tv.resnet18,
    "tv:resnet50": tv.resnet50,
    "tv:mobilenet_v3_small": tv.mobilenet_v3_small,
    "tv:regnet_y_400mf": tv.regnet_y_400mf,
    "functional": blocks.Functional,
    "shared": blocks.Shared,
    "two consumers": blocks.TwoConsumers,
    "loop": blocks.Loop,
    "helper": blocks.Helper,
    "helper twice": blocks.HelperTwice,
}


@pytest.mark.parametrize("name", MODELS)
def test_direct_sites_are_those_of_a_real_run(name: str) -> None:
    model = MODELS[name]().eval()
    for module in model.modules():
        if hasattr(module, "inplace"):
            module.inplace = False
    channels = next(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    with torch.no_grad(), Consumers(model) as run:
        model(torch.randn(1, channels, 64, 64))
    found = find_sites(model, is_bn)
    fused = {site.norm for site in found.sites if site.activation and site.activation.kind == "fused"}
    expected = {norm for norm, used in run.found.items() if len(used) == 1 and used[0] in ACTIVATIONS} - fused
    assert {site.norm for site in found.sites if site.activation} - fused == expected
    assert not found.uncovered


@pytest.mark.parametrize(
    ("make", "counts", "left"),
    [
        (lambda: timm.create_model("resnet18"), {"module": 9, "none": 11}, 8),
        (tv.resnet50, {"module": 1, "call": 32, "none": 20}, 16),
        (lambda: timm.create_model("efficientnet_b0"), {"fused": 33, "none": 16}, 32),
        (lambda: timm.create_model("res2net50d"), {"module": 3, "call": 64, "none": 20}, 16),
        (lambda: timm.create_model("resnetv2_50d_gn"), {}, 51),
        (lambda: tv.inception_v3(init_weights=False), {"call": 96}, 0),
        (lambda: tv.segmentation.fcn_resnet50(weights_backbone=None), {"module": 2, "call": 32, "none": 20}, 16),
        (blocks.Rates, {"call": 4}, 0),
        (blocks.SamePad, {"module": 1}, 0),
        (blocks.Refuses, {"call": 1}, 1),
        (blocks.Branching, {"call": 3}, 1),
        (lambda: blocks.Custom(blocks.Swish()), {"call": 2}, 0),
        (lambda: blocks.Custom(blocks.HardSwish()), {"call": 2}, 0),
        (lambda: blocks.Custom(nn.Softmax2d()), {"none": 2}, 0),
        (blocks.Sequences, {"call": 3}, 0),
    ],
)
def test_counts(make: Callable[[], nn.Module], counts: dict[str, int], left: int) -> None:
    try:
        with torch.device("meta"):
            model = make()
    except NotImplementedError:  # some models read their tensors while they are built
        model = make()
    found = find_sites(model, is_bn)
    assert kinds_of(found) == counts
    assert len(found.unmatched) == left
    assert set(found.uncovered) <= {"bn2"}  # of blocks that call one norm


def test_a_shared_activation_is_told_apart_by_call() -> None:
    found = find_sites(tv.resnet50(), is_bn)
    by_norm = {site.norm: site for site in found.sites}
    stem = by_norm["bn1"].activation
    assert stem is not None
    assert (stem.kind, stem.name, stem.owner, stem.call) == ("module", "relu", "", None)
    act = by_norm["layer2.1.bn2"].activation
    assert act is not None
    assert act.call is not None
    assert (act.kind, act.name, act.owner) == ("call", "layer2.1.relu#1", "layer2.1")
    assert by_norm["layer2.1.bn2"].owner_type == "Bottleneck"
    assert act.call.norm is None
    last = by_norm["layer2.1.bn3"]
    assert (last.activation, last.reason) == (None, "residual addition")
    assert {left.reason for left in found.unmatched} == {"after a residual addition"}
    assert not any(site.last_before_pool for site in found.sites)


def test_fused_and_absent_activations() -> None:
    class Model(nn.Sequential):
        pass

    model = Model(
        nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act_layer=nn.SiLU), BatchNormAct2d(4, apply_act=False), nn.Hardswish(),
        GroupNormAct(4, 2), BatchNormAct2d(4, act_layer=nn.Softmax2d, inplace=None), nn.LayerNorm(4), nn.ReLU(),
    )  # fmt: skip
    found = find_sites(model, [BatchNormAct2d])
    first, second, third = found.sites
    assert first.activation is not None
    assert (first.activation.kind, first.activation.name, first.activation.module) == ("fused", "1.act", model[1].act)
    assert second.activation is not None
    assert (second.activation.kind, second.activation.name) == ("module", "3")
    assert third.reason == "its own activation, Softmax2d, is not known to be elementwise"
    assert {left.name: left.reason for left in found.unmatched} == {
        "4.act": "its norm, GroupNormAct, is not one of those asked for",
        "7": "its norm, LayerNorm 6, is not one of those asked for",
    }


def test_functional_calls_come_as_modules() -> None:
    one, two = find_sites(blocks.Functional(), is_bn).sites
    assert one.activation is not None
    assert two.activation is not None
    assert (one.activation.name, one.activation.type) == ("relu#0", "ReLU")
    assert isinstance(two.activation.module, nn.LeakyReLU)
    assert two.activation.module.negative_slope == 0.3
    one, two = find_sites(blocks.Methods(), is_bn).sites
    assert one.activation is not None
    assert two.activation is not None
    assert (one.activation.type, two.activation.type) == ("ReLU", "Hardtanh")


def test_dropout_may_stand_between_in_either_mode() -> None:
    one, two = find_sites(blocks.BehindDropout(), is_bn).sites
    assert one.activation is not None
    assert two.activation is not None
    assert (one.activation.type, two.activation.type) == ("GELU", "SiLU")


def test_two_consumers_are_no_site() -> None:
    one, two = find_sites(blocks.TwoConsumers(), is_bn).sites
    assert one.activation is None
    assert one.reason == "output used twice: relu(), add()"
    assert two.reason == "residual addition"


def test_a_norm_at_two_places() -> None:
    first, second = find_sites(blocks.NormTwice(), is_bn).sites
    assert [(site.norm, site.place, site.places) for site in (first, second)] == [("bn1", 0, 2), ("bn1", 1, 2)]
    assert first.activation is not None
    assert second.activation is not None
    assert (first.activation.type, second.activation.type) == ("ReLU", "SiLU")


def test_calls_of_one_mode_only() -> None:
    found = sites(blocks.TrainOnly())
    assert [found[name].activation is not None for name in ("bn1", "bn2")] == [True, True]


def test_one_block_called_after_different_norms() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.bns = nn.Sequential(nn.ReLU()), nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.bns[1](self.act(self.bns[0](x))))

    found = find_sites(Model(), is_bn)
    assert {site.reason for site in found.sites} == {"the call of its activation follows other layers too"}
    assert [left.name for left in found.unmatched] == ["act.0"]


def test_a_block_called_twice_is_one_site() -> None:
    block = blocks.Functional()
    model = nn.Sequential(block, block)
    assert [site.places for site in find_sites(model, is_bn).sites] == [1, 1]
    assert all(site.activation for site in find_sites(model, is_bn).sites)


def test_what_no_trace_can_follow() -> None:
    found = find_sites(blocks.Iterating(), is_bn)
    assert [site.norm for site in found.sites] == ["block.bn1", "block.bn2"]
    assert list(found.uncovered) == ["bn"]
    assert found.uncovered["bn"].startswith("Iterating cannot be traced: TraceError")
    assert [(act.name, act.reason) for act in found.unmatched if act.name == "act"] == [("act", found.uncovered["bn"])]


@pytest.mark.parametrize("make", [blocks.Loop, blocks.Indexed, blocks.HelperTwice])
def test_one_call_after_several_norms_asks_which_it_was(make: Callable[[], nn.Module]) -> None:
    calls = [site.activation.call for site in find_sites(make(), is_bn).sites if site.activation]
    selectors = [call.norm for call in calls if call is not None]
    assert [norm[1] for norm in selectors if norm is not None] == ["bn1", "bn2"]


def test_a_conversion_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(converter, "find_sites", lambda *args: runs.append(args) or find_sites(*args))
    model = tv.resnet18()
    retrofit.convert(model, "ln-pn", check=False)
    assert len(runs) == 1
    plan = retrofit.plan(tv.resnet18(), "ln-pn")
    for other in (tv.resnet18(), tv.resnet18()):  # another model than the plan's
        apply(plan, other)
    assert len(runs) == 4


def test_a_change_after_the_plan_is_seen() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    plan = retrofit.plan(model, "ln-pn")
    model[2] = nn.Sigmoid()
    apply(plan, model)
    assert isinstance(model[2].activation, nn.Sigmoid)


def test_what_cannot_be_traced_counts_once() -> None:
    model = nn.Sequential(blocks.Iterating(), blocks.Shared())
    said = retrofit.plan(model, "ln-pn").activations
    assert said.startswith("4 of 7 activations are converted")  # 2 of each `Shared`, whose third follows an addition


def test_uncalled_and_root_norms() -> None:
    class Model(blocks.Shared):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.spare_act = nn.BatchNorm2d(4), nn.ReLU()

    found = find_sites(Model(), is_bn)
    assert found.uncovered == {"spare": "never called by the model's forward"}
    assert "never called by the model's forward" in {act.reason for act in found.unmatched if act.name == "spare_act"}
    assert find_sites(nn.BatchNorm2d(4), is_bn).uncovered == {"": "it is the whole model"}


def test_squeeze_excite_and_gates() -> None:
    found = sites(blocks.Gate())
    assert found["bn_se"].in_squeeze_excite
    assert not found["bn"].in_squeeze_excite
    assert not found["bn_gate"].in_squeeze_excite
    assert found["bn_gate"].reason == "feeds a gate: Sigmoid gate"
    left = {left.name: left.reason for left in find_sites(tv.mobilenet_v3_small(), is_bn).unmatched}
    assert left["features.1.block.1.activation"] == "inside a squeeze-excite"


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda: timm.create_model("efficientnet_b0"), ["bn2"]),
        (lambda: timm.create_model("mobilenetv3_small_100"), ["blocks.5.0.bn1"]),
        (lambda: timm.create_model("densenet121"), ["features.norm5"]),
        (lambda: timm.create_model("resnetv2_50"), ["norm"]),
        (lambda: timm.create_model("ese_vovnet19b_slim"), ["stages.3.blocks.0.conv_concat.bn"]),
        (tv.densenet121, ["features.norm5"]),
        (tv.mobilenet_v2, ["features.18.1"]),
        (tv.vgg11_bn, []),
        (tv.resnet18, []),
        (
            lambda: tv.googlenet(init_weights=False),
            [f"inception5b.branch{branch}.bn" for branch in ("1", "2.1", "3.1", "4.1")],
        ),
    ],
)
def test_the_last_activation_before_the_pooling(make: Callable[[], nn.Module], last: list[str]) -> None:
    with torch.device("meta"):
        model = make()
    assert [site.norm for site in find_sites(model, is_bn).sites if site.last_before_pool] == last
