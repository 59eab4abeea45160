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
from retrofit.graph.sites import Activation, find_sites
from retrofit.surgery import planning
from tests.graph import blocks

tv = torchvision.models


def is_bn(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


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
    "tv:mobilenet_v3_small": tv.mobilenet_v3_small,
    "functional": blocks.Functional,
    "two consumers": blocks.TwoConsumers,
    "loop": blocks.Loop,
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
    expected = {norm for norm, used in run.found.items() if len(used) == 1 and used[0] in ACTIVATIONS}
    assert {site.norm for site in found.sites if site.activation} == expected
    assert not found.uncovered


@pytest.mark.parametrize(
    ("make", "counts", "left"),
    [
        (lambda: timm.create_model("resnet18"), {"module": 9, "none": 11}, 8),
        (lambda: timm.create_model("efficientnet_b0"), {"fused": 33, "none": 16}, 32),
        (lambda: timm.create_model("res2net50d"), {"module": 3, "call": 64, "none": 20}, 16),
        (lambda: tv.inception_v3(init_weights=False), {"call": 96}, 0),
        (lambda: blocks.Custom(nn.Softmax2d()), {"none": 2}, 0),
    ],
)
def test_counts(make: Callable[[], nn.Module], counts: dict[str, int], left: int) -> None:
    found = find_sites(make(), is_bn)
    assert Counter(site.activation.kind if site.activation else "none" for site in found.sites) == counts
    assert len(found.unmatched) == left
    assert set(found.uncovered) <= {"bn2"}  # of blocks that call one norm


def test_a_shared_activation_is_told_apart_by_call() -> None:
    with torch.device("meta"):
        found = find_sites(tv.resnet50(), is_bn)
    by_norm: dict[str, Any] = {site.norm: site for site in found.sites}
    stem, act = by_norm["bn1"].activation, by_norm["layer2.1.bn2"].activation
    assert (stem.kind, stem.name, stem.owner) == ("module", "relu", "")
    assert (act.kind, act.name, act.owner, act.selector) == ("call", "layer2.1.relu#1", "layer2.1", None)
    last = by_norm["layer2.1.bn3"]
    assert (last.owner_type, last.activation, last.reason) == ("Bottleneck", None, "residual addition")
    assert {left.reason for left in found.unmatched} == {"after a residual addition"}
    assert not any(site.last_before_pool for site in found.sites)


def test_fused_and_absent_activations() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act_layer=nn.SiLU), BatchNormAct2d(4, apply_act=False), nn.Hardswish(),
        GroupNormAct(4, 2), BatchNormAct2d(4, act_layer=nn.Softmax2d, inplace=None), nn.LayerNorm(4), nn.ReLU(),
    )  # fmt: skip
    found = find_sites(model, lambda module: isinstance(module, BatchNormAct2d))
    sites: list[Any] = found.sites
    first, second, third = sites
    assert first.activation == Activation("fused", "1.act", nn.SiLU())
    assert (second.activation.kind, second.activation.name) == ("module", "3")
    assert third.reason == "its own activation, Softmax2d, is not known to be elementwise"
    assert {left.name: left.reason for left in found.unmatched} == {
        "4.act": "its norm, GroupNormAct, is not one of those asked for",
        "7": "its norm, LayerNorm 6, is not one of those asked for",
    }


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
    found = find_sites(nn.Sequential(block, block), is_bn).sites
    assert [(site.places, site.activation is not None) for site in found] == [(1, True), (1, True)]


def test_what_no_trace_can_follow() -> None:
    found = find_sites(blocks.Iterating(), is_bn)
    assert [site.norm for site in found.sites] == ["block.bn1", "block.bn2"]
    assert list(found.uncovered) == ["bn"]
    assert found.uncovered["bn"].startswith("Iterating cannot be traced: TraceError")
    assert [(act.name, act.reason) for act in found.unmatched if act.name == "act"] == [("act", found.uncovered["bn"])]


def test_a_conversion_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    monkeypatch.setattr(planning, "find_sites", lambda *args: runs.append(args) or find_sites(*args))
    retrofit.convert(tv.resnet18(), "ln-pn", check=False)
    assert len(runs) == 1


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
    found = {site.norm: site for site in find_sites(blocks.Gate(), is_bn).sites}
    assert [name for name, site in found.items() if site.in_squeeze_excite] == ["bn_se"]
    assert found["bn_gate"].reason == "feeds a gate: Sigmoid gate"
    left = {left.name: left.reason for left in find_sites(tv.mobilenet_v3_small(), is_bn).unmatched}
    assert left["features.1.block.1.activation"] == "inside a squeeze-excite"


@pytest.mark.parametrize(
    ("make", "last"),
    [
        (lambda: timm.create_model("efficientnet_b0"), ["bn2"]),
        (lambda: timm.create_model("mobilenetv3_small_100"), ["blocks.5.0.bn1"]),
        (lambda: timm.create_model("ese_vovnet19b_slim"), ["stages.3.blocks.0.conv_concat.bn"]),
        (tv.densenet121, ["features.norm5"]),
        (tv.vgg11_bn, []),
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
