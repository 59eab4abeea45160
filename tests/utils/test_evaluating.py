"""A network that is looked at for a moment is left as it was, whatever its `train` does; hooks are gone again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torchvision.models.feature_extraction import create_feature_extractor

import retrofit
from retrofit.graph.sites import find_sites
from retrofit.utils.evaluating import copied, evaluating
from retrofit.utils.hooks import hooked
from retrofit.utils.placement import autocast, device_of, placement_of

X = torch.randn(2, 3, 8, 8)


class Drops(nn.Module):
    """Drops out by its own mode, which a graph made of it has built in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.relu(self.bn(self.conv(x))), 0.5, self.training)


class Merges(nn.Module):
    """Folds a factor into its weight for evaluation, as low-rank adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def train(self, mode: bool = True) -> Merges:
        if mode != self.training:
            self.linear.weight.data *= 0.5 if mode else 2
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def look(model: nn.Module) -> None:
    with evaluating(model):
        model(X)


@pytest.mark.parametrize("looks", [look, find_sites, lambda model: retrofit.update_bn([X], model)])
def test_a_graph_for_each_mode(looks: Callable[[nn.Module], object]) -> None:
    model = create_feature_extractor(Drops(), ["dropout"]).train()
    looks(model)
    assert all(module.training for module in model.modules())
    one, other = (model(X)["dropout"] for _ in range(2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("training", [False, True])
def test_a_mode_that_changes_weights(training: bool) -> None:
    model = nn.Sequential(Merges(), nn.Linear(3, 2)).train(training)
    model[1].train(not training)
    before = model[0].linear.weight.clone()
    with evaluating(model):
        assert not model[0].training
    assert [module.training for module in model] == [training, not training]
    assert torch.equal(model[0].linear.weight, before)


def test_weights_that_pruning_computed_are_not_copied() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.raises(retrofit.RetrofitError, match=r"make them permanent first, by torch.nn.utils.prune.remove"):
        copied(model)
    prune.remove(model[0], "weight")
    other = copied(model)
    assert other[0].weight is not model[0].weight
    assert torch.equal(other[0].weight, model[0].weight)


def test_hooks_are_gone_after_a_failure_within_and_of_the_registration() -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("amid")

    layer, none = nn.Identity(), None
    with pytest.raises(RuntimeError, match="amid"), hooked([layer.register_forward_hook(fail)]):
        layer(1)
    assert not layer._forward_hooks
    with pytest.raises(AttributeError):
        hooked(one.register_forward_hook(lambda *_: None) for one in (layer, none)).__enter__()  # type: ignore[union-attr]
    assert not layer._forward_hooks


def test_of_the_first_tensor() -> None:
    assert device_of(nn.ReLU()) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm2d(2, affine=False, device="meta")) == torch.device("meta")  # buffers alone
    assert placement_of(nn.Linear(2, 2).bfloat16()) == (torch.device("cpu"), torch.bfloat16)
    assert placement_of(nn.ReLU()) == (torch.device("cpu"), torch.float32)


def test_mixed_precision_only_where_a_dtype_is_given() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    for dtype, made in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        with autocast(torch.device("cpu"), dtype):
            assert layer(x).dtype == made
