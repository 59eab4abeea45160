"""A run that learns nothing is told so, with the cause."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from retrofit.finetune.divergence import all_alike, at_chance, explanation
from retrofit.finetune.recipe import Recipe
from tests.finetune.conftest import Train, small_network
from tests.finetune.test_loop import Listener


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


@pytest.mark.parametrize(
    ("to", "settings", "steps", "collapsed", "untrained", "said"),
    [
        (
            "gn",
            {"warmup_epochs": 0},
            20,
            True,
            True,
            "too high for layers that take no statistics of the batch without warm",
        ),
        ("gn", {}, 500, False, False, "; lower `lr` or raise `warmup_epochs`"),
        (
            "bnn",
            {"lr": 0.5},
            500,
            True,
            False,
            "all images get the same answer: the learning rate 0.5 is probably too high;",
        ),
        ("bnn", {}, 20, False, True, "it began with random weights"),
        ("bnn", {"lr": 1e-5}, 20, False, False, "20 steps are few: train it longer"),
    ],
)
def test_the_cause(to: str, settings: dict[str, Any], steps: int, collapsed: bool, untrained: bool, said: str) -> None:
    assert said in explanation(small_network(to).model, Recipe(**settings), steps, collapsed, untrained)


@pytest.mark.parametrize(("opt", "lr", "warned"), [("sgd", 100.0, True), ("adamw", 3e-3, False)])
def test_a_run_at_chance_is_warned_of_once(train: Train, opt: str, lr: float, warned: bool) -> None:
    listener = Listener()
    result = train("run", small_network("gn"), epochs=4, lr=lr, opt=opt, warmup_epochs=0, callback=listener)
    notes = [note for note in listener.notes if "no better than guessing" in note]
    assert len(notes) == warned
    assert not warned or "have collapsed" in notes[0]
    assert all(row["val_loss"] > 0 for row in result.rows)
