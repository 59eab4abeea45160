"""Accuracy under attack, against classifiers whose strongest attack is known in closed form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from retrofit.errors import UsageError
from retrofit.evaluation.accuracy import Attack, Kind, attack_on, evaluate
from retrofit.images.dataset import open_images
from retrofit.record import Preprocess
from tests.pictures import write_folder

MEANS, STDS = (0.2, 0.5, 0.6), (0.1, 0.3, 0.25)
MEAN, STD = torch.tensor(MEANS).view(3, 1, 1), torch.tensor(STDS).view(3, 1, 1)


class Linear(nn.Module):
    """Two classes by the sign of w . x, x the image from 0 to 1."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        margin = (pixels(x).double() * self.weight).sum((1, 2, 3))
        return torch.stack([-margin, margin], 1)


def normalized(image: Tensor) -> Tensor:
    return (image - MEAN) / STD


def pixels(normalized: Tensor) -> Tensor:
    return normalized * STD + MEAN


@pytest.mark.parametrize("kind", ["fgsm", "pgd"])
def test_a_linear_classifier_loses_what_the_weights_allow(kind: Kind) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 4, 4, generator=generator, dtype=torch.float64)
    image = torch.rand(5, 3, 4, 4, generator=generator) * 0.8 + 0.1
    labels = torch.tensor([1, 0, 1, 1, 0])
    changed = Attack(kind, 0.05, MEANS, STDS)(Linear(weight), normalized(image), labels)
    sign = torch.where(labels == 1, -1.0, 1.0).view(-1, 1, 1, 1) * weight.sign()
    torch.testing.assert_close((pixels(changed) - image).double(), 0.05 * sign, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["fgsm", "pgd"])
def test_pixels_stay_pixels(kind: Kind) -> None:
    weight, image = torch.ones(3, 2, 2, dtype=torch.float64), torch.full((1, 3, 2, 2), 0.98)
    changed = Attack(kind, 0.1, MEANS, STDS)(Linear(weight), normalized(image), torch.tensor([0]))
    torch.testing.assert_close(changed, normalized(torch.ones(1, 3, 2, 2)))


def test_pgd_follows_a_bend_that_fgsm_does_not() -> None:
    """|x - 0.5| falls first and rises then: one full step goes past the bottom, ten small ones stay there."""

    class Bent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            distance = (x - 0.5).abs().sum((1, 2, 3))
            return torch.stack([10 * distance, torch.zeros_like(distance)], 1)

    image, label = torch.full((1, 1, 1, 1), 0.54), torch.tensor([0])
    by = {kind: Attack(kind, 0.1, (0.0,), (1.0,))(Bent(), image, label).item() for kind in ("fgsm", "pgd")}
    assert by["fgsm"] == pytest.approx(0.44)
    assert abs(by["pgd"] - 0.5) < 0.1 / 4


def test_the_accuracy_stands_beside_the_clean_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pictures", wrong=0, each=4)
    preprocess = Preprocess((3, 16, 16), (0.0,) * 3, (1.0,) * 3, "nearest", 1.0)

    class Colours(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 20 * x.mean((2, 3))

    model, data = Colours(), open_images(folder)
    clean = evaluate(model, data, preprocess, workers=0)
    assert (clean.attacked1, clean.attacked_top1) == (None, None)
    tops = []
    for eps in (1 / 255, 1.0):
        found = evaluate(model, data, preprocess, workers=0, attack=attack_on(preprocess, "pgd", eps))
        assert (found.correct1, found.images) == (clean.correct1, clean.images)
        tops.append(found.attacked_top1)
    assert tops[0] == clean.top1
    assert tops[1] is not None
    assert tops[1] < clean.top1


@pytest.mark.parametrize(("kind", "eps", "problem"), [(None, 0.1, "name one with"), ("pgd", 0.0, "above 0")])
def test_what_is_no_attack(kind: Kind | None, eps: float, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        attack_on(Preprocess((3, 16, 16), MEANS, STDS, "nearest", 1.0), kind, eps)
