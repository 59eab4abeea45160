"""A run that learns nothing."""

import math

import pytest
import torch
from torch import nn

from retrofit.evaluation import Accuracy
from retrofit.finetune.chance_watch import ChanceWatch, all_alike, at_chance, explanation
from retrofit.finetune.recipe import Recipe
from tests.finetune.conftest import Listener, Train, small_network


@pytest.mark.parametrize(
    ("top1", "loss", "images", "classes", "expected"),
    [
        *((10.0, math.log(10), 300, 10, True), (20.0, math.log(10), 300, 10, False)),
        (12.0, 5.0, 300, 10, True),  # sure of itself and wrong
        (20.0, math.log(10), 10, 10, True),  # of ten images that may be luck
        *((10.0, 1.8, 300, 10, False), (100.0, 0.0, 10, 1, False)),
    ],
)
def test_at_chance(top1: float, loss: float, images: int, classes: int, expected: bool) -> None:
    assert at_chance(top1, loss, images, classes) is expected


def test_answers_that_are_alike() -> None:
    images = torch.randn(6, 3, 4, 4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    for weight, bias, alike in (
        (1.0, 1.0, False),
        (1e-3, 0.0, False),
        (0.0, 0.0, False),
        (0.0, 1.0, True),
    ):
        nn.init.normal_(
            model[1].weight, std=weight
        )  # small, of a classifier that has hardly begun to learn
        nn.init.normal_(model[1].bias, std=bias)
        assert all_alike(model, images) is alike


@pytest.mark.parametrize(
    ("steps", "collapsed", "untrained", "said"),
    [
        (20, True, True, "all images get the same answer, or the learning rate 0.0003 is too high"),
        (500, False, False, "too high; lower `lr`, raise `warmup_epochs`, or train it longer"),
        (20, False, True, "it began with random weights: train it longer, or begin with"),
        (20, False, False, "20 steps may be too few, or"),
    ],
)
def test_the_cause(steps: int, collapsed: bool, untrained: bool, said: str) -> None:
    assert said in explanation(Recipe(), steps, collapsed, untrained)


def test_a_run_that_falls_back_to_chance_is_warned_of_once() -> None:
    watch = ChanceWatch(Recipe(epochs=9, warmup_epochs=1), 100, 10, untrained=False)
    warned = []
    for epoch, top1 in enumerate((10.0, 10.0, 10.0, 50.0, 10.0, 10.0, 10.0, 50.0, 10.0), 1):
        row = {"epoch": epoch, "val_top1": top1, "val_loss": math.log(10)}
        accuracy = Accuracy(300, 3 * round(top1), 300, 10)
        if watch.warning(row, accuracy, nn.Identity(), iter(())):
            warned.append(epoch)
    assert warned == [3]


@pytest.mark.parametrize(("right", "warned"), [(95, [3]), (96, [])])
def test_a_run_that_gives_one_answer_alone_is_warned_of_at_its_end(
    right: int, warned: list[int]
) -> None:
    watch = ChanceWatch(Recipe(epochs=3), 100, 2, untrained=False, names=("well", "ill"))
    accuracy = Accuracy(100, right, 100, 2, class_counts=(5, 95))
    found = {}
    for epoch in (1, 2, 3):
        row = {"epoch": epoch, "val_top1": float(right), "val_loss": 0.2}
        found[epoch] = watch.warning(row, accuracy, nn.Identity(), iter(()))
    assert [epoch for epoch, said in found.items() if said] == warned
    assert "always answering 'ill'" in str(found[3]) or not warned


def test_images_of_one_class_to_validate_on_are_told_at_once() -> None:
    watch = ChanceWatch(Recipe(epochs=9), 100, 2, untrained=False, names=("well", "ill"))
    row = {"epoch": 1, "val_top1": 100.0, "val_loss": 0.1}
    accuracy = Accuracy(10, 10, 10, 2, class_counts=(10, 0))
    found = [watch.warning(row, accuracy, nn.Identity(), iter(())) for _ in range(2)]
    said = "top-1 is of images of 'well' alone: it says nothing of other classes"
    assert found == [f"warning: {said}", None]


def test_a_run_at_chance_is_warned_of_once(train: Train) -> None:
    listener = Listener()
    result = train(
        "run",
        small_network("gn"),
        epochs=4,
        lr=100.0,
        opt="sgd",
        warmup_epochs=0,
        callback=listener,
    )
    (note,) = [note for note in listener.notes if "no better than guessing" in note]
    assert "have collapsed" in note
    assert all(row["val_loss"] > 0 for row in result.rows)
