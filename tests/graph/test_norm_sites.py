"""Tracing: what it covers, and that it leaves the model as it was; and the sites of norms and
activations.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from timm.layers import BatchNormAct2d, GroupNormAct
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import retrofit
from retrofit.graph.dataflow import Flows
from retrofit.graph.norm_sites import Activation, find_sites
from retrofit.graph.recognition import is_norm
from retrofit.surgery import converter
from tests.graph import blocks

tv = torchvision.models


def is_bn(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm)


def names(flows: Flows) -> list[str]:  # the traced modules; nothing here depends on the mode
    traced = [flow.name for flow in flows.flows]
    half = len(traced) // 2
    assert traced[:half] == traced[half:]
    return traced[:half]


@pytest.mark.parametrize("make", [tv.resnet18, blocks.Remembers])
def test_a_model_is_one_graph_and_stays_as_it_was(make: Callable[[], nn.Module]) -> None:
    model = make()
    next(model.children()).eval()
    before = [dict(vars(module)) for module in model.modules()]
    flows = Flows(model, is_norm)
    assert names(flows) == [""]
    assert not flows.failures
    assert [dict(vars(module)) for module in model.modules()] == before


class ChangesInTrain(blocks.Block):  # its `train` changes more than the mode
    skip = False

    def train(self, mode: bool = True) -> Any:
        self.skip = mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return out if self.skip else out + x


@pytest.mark.parametrize("make", [blocks.TrainOnly, ChangesInTrain])
def test_both_modes_are_traced(make: Callable[[], nn.Module]) -> None:
    first, second = (
        sorted(str(node) for node in flow.graph.nodes) for flow in Flows(make(), is_norm).flows
    )
    assert first != second


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (blocks.Branching, 2),
        (blocks.SamePad, 6),
        (blocks.Refuses, 1),
        (blocks.PoolsByRank, 1),
        (blocks.SetsByRank, 1),
        (blocks.Shared, 1),
        (blocks.AsksTwice, 2),
        (blocks.ChangesRank, 3),
    ],
)
def test_every_path_is_followed_but_those_that_end_in_an_error(
    make: Callable[[], nn.Module], paths: int
) -> None:
    flows = Flows(make(), is_norm)
    assert not flows.failures
    assert len(names(flows)) == paths


def test_checks_that_end_in_an_error_are_no_branches() -> None:
    flows = Flows(nn.Sequential(*(blocks.Checks() for _ in range(8))), is_norm)
    assert not flows.failures
    assert len(names(flows)) == 1
    assert len(names(Flows(blocks.Catches(), is_norm))) == 2


def test_parts_that_branch_often_are_traced_by_themselves() -> None:
    flows = Flows(nn.Sequential(*(blocks.Branching() for _ in range(3))), is_norm)
    assert not flows.failures
    assert names(flows) == ["", "0", "0", "1", "1", "2", "2"]
    assert all(site.activation for site in find_sites(flows.flows[0].module, is_bn).sites[:2])


def test_a_branching_part_is_not_vouched_for_where_it_gets_optional_arguments() -> None:
    model = blocks.WithOptions()
    assert names(Flows(model, is_norm)) == [""]
    assert [site.activation for site in find_sites(model, is_bn).sites] == []


class Halves(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return super().forward(x)


def test_parts_are_traced_where_the_whole_cannot_be() -> None:
    for model, parts, reason in (
        (blocks.Iterating(), ["block"], "TraceError: Proxy object cannot be iterated"),
        (Halves(nn.BatchNorm1d(4)), [], "TraceError: it branches on values more than 6 times"),
    ):
        flows = Flows(model, is_norm)
        assert names(flows) == parts
        assert flows.failures[model].startswith(reason)


def test_a_detector_is_covered_by_its_backbone() -> None:
    model = tv.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    flows = Flows(model, is_norm)
    assert names(flows) == ["backbone.body"]
    assert all(
        len(flows.calls[module]) == 2
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
    )


def test_a_class_that_fx_cannot_enter_is_one_step_and_has_a_graph_of_its_own() -> None:
    with torch.device("meta"):
        model = timm.create_model("mobilevit_xxs")
    flows = Flows(model, lambda module: isinstance(module, nn.BatchNorm2d))
    assert set(names(flows)) == {"", "stages.2.1", "stages.3.1", "stages.4.1"}
    assert not flows.failures


def test_hooks_do_not_run_and_make_a_block_one_step_to_what_is_around_it() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.ReLU(), nn.Conv2d(4, 4, 1)
    )
    assert find_sites(model, is_norm).sites[0].activation is not None
    model[0].register_forward_hook(lambda *_: 1 / 0)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    (site,) = find_sites(model, is_norm).sites
    assert (site.activation, site.reason) == (None, "output of 0, which is traced on its own")


@pytest.mark.parametrize(
    ("make", "counts", "left"),
    [
        (lambda: timm.create_model("resnet18"), {"module": 9, "none": 11}, 8),
        (tv.mobilenet_v3_small, {"module": 23, "none": 11}, 19),
        (lambda: timm.create_model("efficientnet_b0"), {"fused": 33, "none": 16}, 32),
        (lambda: timm.create_model("res2net50d"), {"module": 3, "call": 64, "none": 20}, 16),
        (lambda: tv.inception_v3(init_weights=False), {"call": 96}, 0),
        (lambda: blocks.Custom(nn.Softmax2d()), {"none": 2}, 0),
    ],
)
def test_counts(make: Callable[[], nn.Module], counts: dict[str, int], left: int) -> None:
    found = find_sites(make(), is_bn)
    assert (
        Counter(site.activation.kind if site.activation else "none" for site in found.sites)
        == counts
    )
    assert len(found.unmatched) == left
    assert set(found.uncovered) <= {"bn2"}  # of blocks that call one norm


def test_a_shared_activation_is_told_apart_by_call() -> None:
    with torch.device("meta"):
        found = find_sites(tv.resnet50(), is_bn)
    by_norm: dict[str, Any] = {site.norm: site for site in found.sites}
    stem, act = by_norm["bn1"].activation, by_norm["layer2.1.bn2"].activation
    assert (stem.kind, stem.name, stem.owner) == ("module", "relu", "")
    assert (act.kind, act.name, act.owner, act.selector) == (
        "call",
        "layer2.1.relu#1",
        "layer2.1",
        None,
    )
    last = by_norm["layer2.1.bn3"]
    assert (last.owner_type, last.activation, last.reason) == (
        "Bottleneck",
        None,
        "residual addition",
    )
    assert {left.reason for left in found.unmatched} == {"after a residual addition"}
    assert not any(site.last_before_pool for site in found.sites)


def test_fused_and_absent_activations() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act_layer=nn.SiLU), BatchNormAct2d(4, apply_act=False), nn.Hardswish(),
        GroupNormAct(4, 2), BatchNormAct2d(4, act_layer=nn.Softmax2d, inplace=None), nn.LayerNorm(4), nn.ReLU(),
    )  # fmt: skip
    found = find_sites(model, lambda module: isinstance(module, BatchNormAct2d))
    sites: list[Any] = found.sites
    assert sites[0].activation == Activation("fused", "1.act", nn.SiLU())
    assert (sites[1].activation.kind, sites[1].activation.name) == ("module", "3")
    assert sites[2].reason == "its own activation, Softmax2d, is not known to be elementwise"
    assert {left.name: left.reason for left in found.unmatched} == {
        "4.act": "its norm, GroupNormAct, is not one of those asked for",
        "7": "its norm, LayerNorm 6, is not one of those asked for",
    }


def test_one_block_called_after_different_norms() -> None:
    act = nn.Sequential(nn.ReLU())
    found = find_sites(nn.Sequential(nn.BatchNorm2d(4), act, nn.BatchNorm2d(4), act), is_bn)
    assert {site.reason for site in found.sites} == {
        "the call of its activation follows other layers too"
    }
    assert [left.name for left in found.unmatched] == ["1.0"]


def test_a_norm_that_is_named_otherwise_at_the_activation() -> None:
    found = find_sites(blocks.Rebinds(), is_bn)
    assert {site.reason for site in found.sites} == {
        "the call of its activation follows other layers too"
    }


def test_a_block_called_twice_is_one_site() -> None:
    block = blocks.Functional()
    found = find_sites(nn.Sequential(block, block), is_bn).sites
    assert [site.call_count for site in found] == [1, 1]
    assert all(site.activation is not None for site in found)


def test_what_no_trace_can_follow() -> None:
    found = find_sites(blocks.Iterating(), is_bn)
    assert [site.norm for site in found.sites] == ["block.bn1", "block.bn2"]
    assert list(found.uncovered) == ["bn"]
    assert found.uncovered["bn"].startswith("Iterating cannot be traced: TraceError")
    assert [(act.name, act.reason) for act in found.unmatched if act.name == "act"] == [
        ("act", found.uncovered["bn"])
    ]


def test_a_conversion_searches_once_and_counts_once_what_cannot_be_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    monkeypatch.setattr(
        converter, "find_sites", lambda *args: runs.append(args) or find_sites(*args)
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 1), blocks.Iterating(), blocks.Shared())
    _, report = retrofit.convert(model, "ln-pn", check=False)
    assert len(runs) == 1  # below: 2 of each `Shared`, whose third follows an addition
    assert report.notes[0].startswith("4 of 7 activations are converted")


def test_uncalled_and_root_norms() -> None:
    model = blocks.Shared()
    model.spare, model.spare_act = nn.BatchNorm2d(4), nn.ReLU()
    found = find_sites(model, is_bn)
    assert found.uncovered == {"spare": "never called by the model's forward"}
    assert "never called by the model's forward" in {
        act.reason for act in found.unmatched if act.name == "spare_act"
    }
    assert find_sites(nn.BatchNorm2d(4), is_bn).uncovered == {"": "it is the whole model"}


def test_squeeze_excite_and_gates() -> None:
    found = {site.norm: site for site in find_sites(blocks.Gate(), is_bn).sites}
    assert [name for name, site in found.items() if site.in_squeeze_excite] == ["bn_se"]
    assert found["bn_gate"].reason == "feeds a gate: Sigmoid gate"
    rescaled = find_sites(blocks.RescaledGate(), is_bn).sites
    assert [site.norm for site in rescaled if site.in_squeeze_excite] == ["bn_se"]
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
        (lambda: blocks.Windows(partial(F.avg_pool2d, kernel_size=4)), ["bn2"]),
        (lambda: blocks.Windows(nn.AvgPool2d(4)), ["bn2"]),
        (tv.googlenet, [f"inception5b.branch{branch}.bn" for branch in ("1", "2.1", "3.1", "4.1")]),
    ],
)
def test_the_last_activation_before_the_pooling(
    make: Callable[[], nn.Module], last: list[str]
) -> None:
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = make()
    assert [site.norm for site in find_sites(model, is_bn).sites if site.last_before_pool] == last
