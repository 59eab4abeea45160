"""Which layer diverged first."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from retrofit.finetune.divergence import first_to_diverge, not_finite
from retrofit.layers import BatchNormalNorm2d


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), BatchNormalNorm2d(4), nn.Conv2d(4, 4, 1), BatchNormalNorm2d(4), nn.Flatten()
    )


@pytest.mark.parametrize(
    ("broken", "named"),
    [("0", "1 (BatchNormalNorm2d)"), ("1", "1 (BatchNormalNorm2d)"), ("2", "3 (BatchNormalNorm2d)")],
)
def test_norms_are_asked_first(broken: str, named: str) -> None:
    model = network()
    assert not_finite(model) is None
    model.get_submodule(broken).weight.data[0] = math.inf
    assert not_finite(model) == f"{broken}.weight"
    assert first_to_diverge(model, torch.randn(4, 3, 5, 5)) == named


def test_other_layers_and_none() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten())
    assert first_to_diverge(model, torch.randn(4, 3, 5, 5)) is None
    model[0].bias.data[0] = math.nan
    assert first_to_diverge(model, torch.randn(4, 3, 5, 5)) == "0 (Conv2d)"


def test_a_running_statistic_counts() -> None:
    model = network()
    model[3].running_lambda[0] = math.nan
    assert not_finite(model) == "3.running_lambda"
