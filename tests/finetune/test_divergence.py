"""Which layer diverged first."""

import math

import pytest
import torch
from torch import nn

from retrofit.finetune.divergence import Fault, divergence_of, not_finite
from retrofit.layers import BatchNormalNorm2d

DEVICE = "start again with `amp=False`, or on another `device`"
SLOWER = "lower `lr` or `noise`, or lengthen `strength_ramp`"


@pytest.mark.parametrize(
    ("broken", "fault", "said"),
    [
        (
            "0.weight",
            "loss",
            ("1 (BatchNormalNorm2d) went first", SLOWER),
        ),  # norms are asked first
        ("1.bias", "loss", ("1 (BatchNormalNorm2d) went first", SLOWER)),
        ("1.running_lambda", "state", ("1 (BatchNormalNorm2d) went first", SLOWER)),
        ("2.weight", "gradient", ("2 (Conv2d) went first", SLOWER)),
        (None, "loss", ("no layer's output is affected", SLOWER)),
        (None, "state", ("no layer's output is affected", SLOWER)),
        (None, "gradient", ("the cause is not `lr`", DEVICE)),
    ],
    ids=str,
)
def test_what_went_first(broken: str | None, fault: Fault, said: tuple[str, str]) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), BatchNormalNorm2d(4), nn.Conv2d(4, 4, 1), nn.Flatten()
    )
    assert not_finite(model) is None
    if broken is not None:
        model.state_dict()[broken].view(-1)[0] = math.nan
        assert not_finite(model) == broken
    found = divergence_of(model, torch.randn(4, 3, 5, 5), fault)
    assert found[0].endswith(said[0])
    assert found[1] == said[1]
