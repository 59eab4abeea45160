"""Tracing: what it covers, and that it leaves the model as it was."""

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from retrofit.graph.find_sites import find_sites
from retrofit.graph.trace import trace
from tests.graph import blocks


def state(model: nn.Module) -> list[dict[str, object]]:
    return [dict(module.__dict__) for module in model.modules()]


def test_a_model_is_one_scope_in_both_modes() -> None:
    model = timm.create_model("resnet18")
    model.layer1.eval()
    before = state(model)
    coverage = trace(model)
    assert [scope.name for scope in coverage.scopes] == ["", ""]
    assert not coverage.failures
    assert state(model) == before


def test_constants_and_caches_do_not_stay_in_the_model() -> None:
    for model in (blocks.Constant(), blocks.Remembers()):
        before = state(model)
        coverage = trace(model)
        assert len(coverage.scopes) == 2
        assert state(model) == before


def test_parts_are_traced_where_the_whole_cannot_be() -> None:
    model = blocks.Iterating()
    coverage = trace(model)
    assert [scope.name for scope in coverage.scopes] == ["block", "block"]
    assert coverage.failures[model].startswith("TraceError: Proxy object cannot be iterated")


@pytest.mark.parametrize(
    ("make", "paths"), [(blocks.Branching, 2), (blocks.SamePad, 6), (blocks.Refuses, 1), (blocks.Shared, 1)]
)
def test_every_path_is_followed_but_those_that_end_in_an_error(make: Callable[[], nn.Module], paths: int) -> None:
    coverage = trace(make())
    assert not coverage.failures
    assert len(coverage.scopes) == 2 * paths


def test_too_many_paths_are_a_failure() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            while x.abs().max() > 1:
                x = x / 2
            return self.bn(x)

    model = Halves()
    assert "branches on values more than 6 times" in trace(model).failures[model]


def test_a_detector_is_covered_by_its_backbone() -> None:
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    coverage = trace(model)
    assert [scope.name for scope in coverage.scopes] == ["backbone.body", "backbone.body"]
    called = set(coverage.scopes[0].modules.values())
    assert all(module in called for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_a_class_that_fx_cannot_enter_is_one_step_and_a_scope_of_its_own() -> None:
    with torch.device("meta"):
        model = timm.create_model("mobilevit_xxs")
    coverage = trace(model, lambda m: isinstance(m, nn.BatchNorm2d))
    assert {scope.name for scope in coverage.scopes} == {"", "stages.2.1", "stages.3.1", "stages.4.1"}
    assert not coverage.failures


def test_hooks_do_not_run() -> None:
    model = blocks.Shared()
    model.conv1.register_forward_hook(lambda *_: 1 / 0)
    sequence = nn.Sequential(model)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    assert [scope.name for scope in trace(sequence).scopes] == ["", "0", "", "0"]


def test_a_block_with_hooks_is_one_step_to_what_is_around_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.ReLU(), nn.Conv2d(4, 4, 1))
    assert find_sites(model).sites[0].activation is not None
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    (site,) = find_sites(model).sites
    assert (site.activation, site.reason) == (None, "output of 0, which is traced on its own")


def test_parts_without_a_norm_are_not_traced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    assert trace(model).scopes == []
