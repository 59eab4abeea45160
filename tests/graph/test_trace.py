"""Tracing: what it covers, and that it leaves the model as it was."""

import timm
import torch
import torchvision
from torch import nn

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
    assert [scope.name for mode in coverage.scopes.values() for scope in mode] == ["", ""]
    assert not coverage.failures
    assert state(model) == before


def test_constants_and_caches_do_not_stay_in_the_model() -> None:
    for model in (blocks.Constant(), blocks.Remembers()):
        before = state(model)
        coverage = trace(model)
        assert all(coverage.scopes.values())
        assert state(model) == before


def test_parts_are_traced_where_the_whole_cannot_be() -> None:
    model = blocks.Branching()
    coverage = trace(model)
    assert [scope.name for scope in coverage.scopes["eval"]] == ["block"]
    assert coverage.failures[model].startswith("TraceError: symbolically traced variables")


def test_a_detector_is_covered_by_its_backbone() -> None:
    model = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    coverage = trace(model)
    assert [scope.name for scope in coverage.scopes["eval"]] == ["backbone.body"]
    called = set(coverage.scopes["eval"][0].modules.values())
    assert all(module in called for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_a_class_that_fx_cannot_enter_is_one_step_and_traced_by_parts() -> None:
    with torch.device("meta"):
        model = timm.create_model("mobilevit_xxs")
    scopes = [scope.name for scope in trace(model, lambda m: isinstance(m, nn.BatchNorm2d)).scopes["train"]]
    assert scopes[0] == ""
    assert "stages.2.1.conv_kxk" in scopes


def test_hooks_do_not_run() -> None:
    model = blocks.Shared()
    model.conv1.register_forward_hook(lambda *_: 1 / 0)
    sequence = nn.Sequential(model)
    model.register_forward_pre_hook(lambda *_: 1 / 0)
    assert [scope.name for scope in trace(sequence).scopes["eval"]] == ["", "0"]


def test_a_block_with_hooks_is_one_step_to_what_is_around_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), nn.ReLU(), nn.Conv2d(4, 4, 1))
    (site,) = find_sites(model).sites
    assert (site.activation is None, site.activation_consumer) == (False, "2")
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    (site,) = find_sites(model).sites
    assert (site.feeder, site.activation, site.reason) == ("0.0", None, "output of 0, which is traced on its own")


def test_parts_without_a_norm_are_not_traced() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    assert trace(model).scopes == {"eval": [], "train": []}
