"""The lambda estimates of a network."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from retrofit.layers import (
    BatchNormalNorm2d,
    GroupNormalNorm,
    InstanceNormalNorm2d,
    LayerNormalNorm,
    LayerNormalNorm2d,
)
from retrofit.layers.functional import batch_normal_norm
from retrofit.layers.lambdas import lambda_values

IMAGES = torch.distributions.Gamma(2.0, 1.0).sample((6, 8, 5, 5))


def test_running_averages_need_no_images() -> None:
    model = nn.Sequential(BatchNormalNorm2d(8), nn.ReLU(), BatchNormalNorm2d(8))
    model[2].running_lambda.fill_(0.5)
    values = lambda_values(model)
    assert list(values) == ["0", "2"]
    assert values["2"].tolist() == [0.5] * 8


@pytest.mark.parametrize(
    ("layer", "sets"),
    [
        (GroupNormalNorm(2, 8), lambda x: x.reshape(12, -1)),
        (InstanceNormalNorm2d(8), lambda x: x.reshape(48, -1)),
        (LayerNormalNorm((8, 5, 5)), lambda x: x.reshape(6, -1)),
        (LayerNormalNorm2d(8), lambda x: x.permute(0, 2, 3, 1).reshape(150, 8)),
    ],
    ids=["group", "instance", "layer", "layer2d"],
)
def test_one_estimate_for_each_normalized_set(layer: nn.Module, sets: object) -> None:
    (found,) = lambda_values(nn.Sequential(layer).eval(), IMAGES).values()
    # Batch normalization with each set as a channel estimates the same lambda.
    rows = sets(IMAGES)  # type: ignore[operator]
    running = torch.zeros(len(rows)), torch.ones(len(rows)), torch.ones(len(rows))
    batch_normal_norm(rows.T, *running, training=True, momentum=1.0, eps=1e-5)
    torch.testing.assert_close(found, running[2], rtol=1e-4, atol=1e-4)
    assert found.std() > 0
