"""Averages of weights that others made."""

from __future__ import annotations

import copy

import pytest
from timm.utils import ModelEmaV3
from torch.optim.swa_utils import AveragedModel

import retrofit
from retrofit.networks.models import odd_strengths
from tests.finetune.conftest import small_network


def test_an_average_stands_at_no_strength_of_its_network() -> None:
    model = small_network("gn").model
    averages = [
        ModelEmaV3(model, decay=0.999),
        AveragedModel(model, avg_fn=lambda mean, new, n: mean + 0.02 * (new - mean), use_buffers=True),
    ]
    for step in range(1, 51):
        retrofit.set_strength(model, step / 50)
        averages[0].update(model)
        averages[1].update_parameters(model)
    assert odd_strengths(averages[0]) is None  # timm's copies the strength
    assert retrofit.strength_of(averages[0].module) == 1.0
    for average in (averages[1], averages[1].eval()):
        assert "layers stand at strength 0." in (odd_strengths(average) or "")
    retrofit.set_strength(averages[1].module, 1.0)
    assert odd_strengths(averages[1]) is None


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.25, 0.333, 1.0])
def test_a_strength_that_was_chosen_is_no_one_s_average(strength: float) -> None:
    model = small_network("ln").model
    retrofit.set_strength(model, strength)
    assert odd_strengths(model) is None
    model.layer1[0].bn1.set_strength(0.5)  # of a second conversion
    assert odd_strengths(model) is None
    assert odd_strengths(copy.deepcopy(small_network(None).model)) is None
