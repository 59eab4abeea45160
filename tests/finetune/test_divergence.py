"""Which layer diverged first."""

import math

import pytest
import torch
from torch import nn

from retrofit.finetune.divergence import Fault, divergence_of, not_finite
from retrofit.finetune.recipe import Recipe
from retrofit.layers import BatchNormalNorm2d

SLOWER = "lower `lr` or `noise`, or lengthen `strength_ramp`"


@pytest.mark.parametrize(
    ("broken", "fault", "amp", "said"),
    [
        (
            "0.weight",
            "loss",
            False,
            ("1 (BatchNormalNorm2d) went first", SLOWER),
        ),  # norms are asked first
        ("1.bias", "loss", False, ("1 (BatchNormalNorm2d) went first", SLOWER)),
        ("1.running_lambda", "state", False, ("1 (BatchNormalNorm2d) went first", SLOWER)),
        ("2.weight", "gradient", False, ("2 (Conv2d) went first", SLOWER)),
        (None, "loss", False, ("all layers are finite, the loss alone is not", SLOWER)),
        (None, "state", False, ("no layer's output is affected", SLOWER)),
        (None, "gradient", False, ("the cause is not `lr`", "start again on another `device`")),
        (None, "gradient", True, ("the cause is not `lr`", "start again with `amp=False`")),
    ],
    ids=str,
)
def test_what_went_first(
    broken: str | None, fault: Fault, amp: bool, said: tuple[str, str]
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), BatchNormalNorm2d(4), nn.Conv2d(4, 4, 1), nn.Flatten()
    )
    assert not_finite(model) is None
    if broken is not None:
        model.state_dict()[broken].view(-1)[0] = math.nan
        assert not_finite(model) == broken
    found = divergence_of(model, torch.randn(4, 3, 5, 5), fault, Recipe(amp=amp))
    assert found[0].endswith(said[0])
    assert found[1] == said[1]
