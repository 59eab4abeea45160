"""A network that is evaluated for a moment is left as it was, whatever its `train` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.feature_extraction import create_feature_extractor

import retrofit
from retrofit.graph.find_sites import find_sites
from retrofit.utils.evaluating import evaluating

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


LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "evaluating": look,
    "find_sites": find_sites,
    "convert": lambda model: retrofit.convert(model, "ln", input_size=(3, 8, 8)),
    "convert to -pn": lambda model: retrofit.convert(model, "ln-pn", check=False),
    "fold": lambda model: retrofit.fold(model, input_size=(3, 8, 8)),
    "update_bn": lambda model: retrofit.update_bn([X], model),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LOOKS)
def test_a_graph_for_each_mode(name: str, training: bool) -> None:
    model = create_feature_extractor(Drops(), ["dropout"]).train(training)
    LOOKS[name](model)
    assert all(module.training is training for module in model.modules())
    one, other = (model(X)["dropout"] for _ in range(2))
    assert torch.equal(one, other) is not training


@pytest.mark.parametrize("training", [False, True])
def test_a_mode_that_changes_weights(training: bool) -> None:
    model = nn.Sequential(Merges(), nn.Linear(3, 2)).train(training)
    model[1].train(not training)
    before = model[0].linear.weight.clone()
    with evaluating(model):
        assert not model[0].training
    assert [module.training for module in model] == [training, not training]
    assert torch.equal(model[0].linear.weight, before)
