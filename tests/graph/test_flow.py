"""Tracing: what it covers, and that it leaves the model as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from retrofit.graph.flow import Flows
from retrofit.graph.sites import find_sites
from tests.graph import blocks


def names(flows: Flows) -> list[str]:
    """The traced modules, each of which is traced in both modes."""
    traced = [flow.name for flow in flows.flows]
    evaluated, trained = traced[: len(traced) // 2], traced[len(traced) // 2 :]
    assert evaluated == trained
    return evaluated


@pytest.mark.parametrize("make", [torchvision.models.resnet18, blocks.Remembers])
def test_a_model_is_one_graph_and_stays_as_it_was(make: Callable[[], nn.Module]) -> None:
    model = make()
    next(model.children()).eval()
    before = [dict(vars(module)) for module in model.modules()]
    flows = Flows(model)
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
def test_both_modes_are_traced_where_they_differ(make: Callable[[], nn.Module]) -> None:
    first, second = (sorted(str(node) for node in flow.graph.nodes) for flow in Flows(make()).flows)
    assert first != second


@pytest.mark.parametrize(
    ("make", "paths"), [(blocks.Branching, 2), (blocks.SamePad, 6), (blocks.Refuses, 1), (blocks.Shared, 1)]
)
def test_every_path_is_followed_but_those_that_end_in_an_error(make: Callable[[], nn.Module], paths: int) -> None:
    flows = Flows(make())
    assert not flows.failures
    assert len(flows.flows) == 2 * paths  # in both modes


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return self.bn(x)


@pytest.mark.parametrize(
    ("make", "parts", "reason"),
    [
        (blocks.Iterating, ["block"], "TraceError: Proxy object cannot be iterated"),
        (Halves, [], "TraceError: it branches on values more than 6 times"),
    ],
)
def test_parts_are_traced_where_the_whole_cannot_be(
    make: Callable[[], nn.Module], parts: list[str], reason: str
) -> None:
    model = make()
    flows = Flows(model)
    assert names(flows) == parts
    assert flows.failures[model].startswith(reason)


def test_a_detector_is_covered_by_its_backbone() -> None:
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    flows = Flows(model)
    assert names(flows) == ["backbone.body"]
    assert all(len(flows.calls[module]) == 2 for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_a_class_that_fx_cannot_enter_is_one_step_and_has_a_graph_of_its_own() -> None:
    with torch.device("meta"):
        model = timm.create_model("mobilevit_xxs")
    flows = Flows(model, lambda module: isinstance(module, nn.BatchNorm2d))
    assert set(names(flows)) == {"", "stages.2.1", "stages.3.1", "stages.4.1"}
    assert not flows.failures


def test_hooks_do_not_run_and_make_a_block_one_step_to_what_is_around_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.ReLU(), nn.Conv2d(4, 4, 1))
    assert find_sites(model).sites[0].activation is not None
    model[0].register_forward_hook(lambda *_: 1 / 0)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    (site,) = find_sites(model).sites
    assert (site.activation, site.reason) == (None, "output of 0, which is traced on its own")


def test_parts_without_a_norm_are_not_traced() -> None:
    assert not Flows(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())).flows
