"""Which layer diverged first; and a run that learns nothing is told so, with the cause."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from retrofit.finetune.divergence import Fault, all_alike, at_chance, divergence_of, explanation, not_finite
from retrofit.finetune.recipe import Recipe
from retrofit.layers import BatchNormalNorm2d
from tests.finetune.conftest import Listener, Train, small_network

SLOWER = "lower `lr` or `noise`, or lengthen `strength_ramp`"


@pytest.mark.parametrize(
    ("broken", "fault", "amp", "said"),
    [
        ("0.weight", "loss", False, ("1 (BatchNormalNorm2d) went first", SLOWER)),  # norms are asked first
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
def test_what_went_first(broken: str | None, fault: Fault, amp: bool, said: tuple[str, str]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormalNorm2d(4), nn.Conv2d(4, 4, 1), nn.Flatten())
    assert not_finite(model) is None
    if broken is not None:
        model.state_dict()[broken].view(-1)[0] = math.nan
        assert not_finite(model) == broken
    found = divergence_of(model, torch.randn(4, 3, 5, 5), fault, Recipe(amp=amp))
    assert found[0].endswith(said[0])
    assert found[1] == said[1]


@pytest.mark.parametrize(
    ("top1", "loss", "images", "classes", "expected"),
    [
        (10.0, math.log(10), 300, 10, True),
        (12.0, 5.0, 300, 10, True),  # sure of itself and wrong
        (20.0, math.log(10), 300, 10, False),
        (20.0, math.log(10), 10, 10, True),  # of ten images that may be luck
        (10.0, 1.8, 300, 10, False),
        (100.0, 0.0, 10, 1, False),
    ],
)
def test_at_chance(top1: float, loss: float, images: int, classes: int, expected: bool) -> None:
    assert at_chance(top1, loss, images, classes) is expected


def test_answers_that_are_alike() -> None:
    images = torch.randn(6, 3, 4, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    assert not all_alike(model, images)
    with torch.no_grad():
        model[1].weight.mul_(1e-3)
        model[1].bias.zero_()
    assert not all_alike(model, images)  # a classifier that has hardly begun to learn
    nn.init.zeros_(model[1].weight)
    assert not all_alike(model, images)
    nn.init.normal_(model[1].bias)
    assert all_alike(model, images)


COLLAPSED = "all images get the same answer: the learning rate 0.0003 is probably too high"


@pytest.mark.parametrize(
    ("to", "settings", "steps", "collapsed", "untrained", "said"),
    [
        ("gn", {"warmup_epochs": 0}, 20, True, True, "layers that take no statistics of the batch without warm-up;"),
        ("gn", {}, 500, False, False, "; lower `lr` or raise `warmup_epochs`"),
        ("bnn", {}, 500, True, False, f"{COLLAPSED};"),
        ("bnn", {}, 20, False, True, "it began with random weights"),
        ("bnn", {}, 20, False, False, "20 steps are few: train it longer"),
    ],
)
def test_the_cause(to: str, settings: dict[str, Any], steps: int, collapsed: bool, untrained: bool, said: str) -> None:
    assert said in explanation(small_network(to).model, Recipe(**settings), steps, collapsed, untrained)


def test_a_run_at_chance_is_warned_of_once(train: Train) -> None:
    listener = Listener()
    result = train("run", small_network("gn"), epochs=4, lr=100.0, opt="sgd", warmup_epochs=0, callback=listener)
    (note,) = [note for note in listener.notes if "no better than guessing" in note]
    assert "have collapsed" in note
    assert all(row["val_loss"] > 0 for row in result.rows)
