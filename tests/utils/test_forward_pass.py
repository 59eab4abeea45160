"""Networks are left as they were, whatever their `train` does; batches are taken as people have
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torchvision.models.feature_extraction import create_feature_extractor

import retrofit
from retrofit.errors import RetrofitError
from retrofit.graph.norm_sites import find_sites
from retrofit.utils.forward_pass import (
    copied,
    copied_for_inference,
    device_of,
    evaluating,
    hooked,
    images_of,
    placement_of,
)

X = torch.randn(2, 3, 8, 8)


class Drops(nn.Module):  # drops out by its own mode, which a graph made of it has built in
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.relu(self.bn(self.conv(x))), 0.5, self.training)


class Merges(nn.Linear):  # folds a factor into its weight for evaluation, as low-rank adapters do
    def train(self, mode: bool = True) -> Merges:
        if mode != self.training:
            self.weight.data *= 0.5 if mode else 2
        return super().train(mode)


def look_for_sites(model: nn.Module) -> None:
    find_sites(model, lambda module: isinstance(module, nn.BatchNorm2d))


@pytest.mark.parametrize("look", [look_for_sites, lambda model: retrofit.update_bn([X], model)])
def test_a_graph_for_each_mode(look: Callable[[nn.Module], object]) -> None:
    model = create_feature_extractor(Drops(), ["dropout"]).train()
    look(model)
    with evaluating(model):
        model(X)
    assert all(module.training for module in model.modules())
    assert not torch.equal(*(model(X)["dropout"] for _ in range(2)))


@pytest.mark.parametrize("training", [False, True])
def test_a_mode_that_changes_weights(training: bool) -> None:
    model = nn.Sequential(Merges(3, 3), nn.Linear(3, 2)).train(training)
    model[1].train(not training)
    before = model[0].weight.clone()
    with evaluating(model):
        assert not model[0].training
    assert [module.training for module in model] == [training, not training]
    assert torch.equal(model[0].weight, before)


def test_weights_that_pruning_computed_are_not_copied() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    advice = r"holds 0\.weight, computed .* torch.nn.utils.prune.remove"
    with pytest.raises(RetrofitError, match=advice) as caught:
        copied(model)
    # torch's own words, which are longer, do not stand before it.
    assert len(str(caught.value)) < 400
    prune.remove(model[0], "weight")
    assert torch.equal(copied(model)[0].weight, model[0].weight)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The .grad attribute:UserWarning")
def test_a_scripted_part_is_copied_for_inference() -> None:
    scripted = torch.jit.script(nn.Linear(3, 2))
    model = copied_for_inference(nn.Sequential(scripted))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    x = torch.randn(4, 3)
    assert torch.equal(model(x), scripted(x))


class _Expanded(nn.Conv2d):
    """A layer that expands its weight in evaluation, as equivariant ones do."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if not mode:
            self.register_buffer("filter", 2 * self.weight)
        return self


def test_a_tensor_that_a_layer_computed_is_named() -> None:
    model = nn.Sequential(_Expanded(3, 4, 1)).eval()
    with pytest.raises(RetrofitError, match=r"holds 0\.filter, computed .*under torch.no_grad\(\)"):
        copied(model)
    with torch.no_grad():
        model.eval()
    assert torch.equal(copied(model)[0].filter, model[0].filter)
    model[0].cache = [2 * model[0].weight]
    with pytest.raises(RetrofitError, match="created explicitly by the user"):
        copied(model)


class _Uncopied(nn.Identity):
    def __deepcopy__(self, memo: Any) -> nn.Module:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("a cache\nof kernels"), KeyError("a cache")])
def test_a_network_that_refuses_copies_says_why(error: Exception) -> None:
    part = _Uncopied()
    part.error = error
    expected = rf"^the network cannot be copied: {type(error).__name__}: .*a cache.*deepcopy fails"
    with pytest.raises(RetrofitError, match=expected):
        copied(nn.Sequential(part))


def test_hooks_are_gone_after_a_failure_within_and_of_the_registration() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("amid")

    layer = nn.Identity()
    with pytest.raises(RuntimeError, match="amid"), hooked([layer.register_forward_hook(fail)]):
        layer(1)
    with pytest.raises(AttributeError):
        hooked(one.register_forward_hook(fail) for one in (layer, None)).__enter__()  # type: ignore[union-attr]
    assert not layer._forward_hooks


def test_of_the_first_tensor() -> None:
    assert device_of(nn.ReLU()) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm2d(2, affine=False, device="meta")) == torch.device(
        "meta"
    )  # buffers alone
    assert placement_of(nn.Linear(2, 2).bfloat16()) == (torch.device("cpu"), torch.bfloat16)
    assert placement_of(nn.ReLU()) == (torch.device("cpu"), torch.float32)


ONE = torch.arange(6.0).view(2, 3, 1, 1)


def test_images_with_labels_or_without_and_nothing_else() -> None:
    for batches in (ONE, [ONE], [(ONE, 1)], [[ONE, None, 5]], iter([ONE])):
        (images,) = images_of(batches)
        assert images is ONE
    wrong = {
        "`images` takes batches of images, .*; batch 1 is int": 5,
        "batch 2 is str": [ONE, "photo.jpg"],
    }
    wrong |= {"batch 1 is tuple": [()], r"batch 2 is \(\)": [ONE, torch.tensor(1.0)]}
    for said, batches in {
        **wrong,
        "batch 2 of `images` holds NaN or infinity": [ONE, ONE * math.nan],
    }.items():
        with pytest.raises(RetrofitError, match=said):
            list(images_of(batches, "images"))


def test_nothing_is_fitted_to_them(tmp_path: Path) -> None:
    wrong = [torch.full((2, 3, 32, 32), float("inf"))]
    source = timm.create_model("test_resnet").eval()
    model, _ = retrofit.convert(timm.create_model("test_resnet"), "ln")
    retrofit.set_strength(model, 1.0)
    for fit in (
        partial(retrofit.fold, model, "poly"),
        partial(retrofit.export_onnx, model, tmp_path / "never.onnx", precision="int8"),
        lambda calibrate: retrofit.bake(model, calibrate),
        partial(retrofit.plan, source, "gn", groups="auto"),
    ):
        with pytest.raises(RetrofitError, match="holds NaN or infinity"):
            fit(calibrate=wrong)
