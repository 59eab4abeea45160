"""Accuracy against pictures whose right answers are known, and images that cannot be read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from retrofit.attack import Attack, Kind, attack_on
from retrofit.errors import RetrofitError
from retrofit.evaluation import Accuracy, evaluate, predictions
from retrofit.images.dataset import open_images
from tests.pictures import PLAIN, Colours, write_tar


def measure(data_dir: Path, model: nn.Module | None = None, **options: Any) -> Any:
    data = open_images(data_dir, class_map=options.pop("class_map", None))
    return evaluate(model or Colours(), data, PLAIN, **{"workers": 0, "batch_size": 5, **options})


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (5, 1)])
def test_counts_of_a_folder(folder: Path, batch_size: int, workers: int) -> None:
    result = measure(folder, batch_size=batch_size, workers=workers)
    assert (result.images, result.correct1, result.correct5, result.outputs) == (12, 10, 12, 7)
    assert (result.top1, result.top5) == (pytest.approx(100 * 10 / 12), 100)
    palette = (
        Colours().palette
    )  # the colour of a picture is its class's, but for two bees that look like ants
    scores = torch.full((3, 7), -9.0).double()
    scores[:, :3] = -torch.cdist(palette, palette).double()
    each = -scores.log_softmax(dim=1)
    wanted = (4 * each[0, 0] + 2 * each[0, 1] + 2 * each[1, 1] + 4 * each[2, 2]) / 12
    assert result.loss == pytest.approx(float(wanted), rel=1e-5)
    assert result.class_counts == (4, 4, 4, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("right", "counts", "said"),
    [
        (9, (1, 9, 0), "no better than always answering 'ill', which is right for 9 of 10 images"),
        (10, (1, 9, 0), ""),
        (7, (0, 0, 10), "top-1 is of images of class 2 alone: it says nothing of other classes"),
    ],
)
def test_one_answer_to_all_is_as_accurate(right: int, counts: tuple[int, ...], said: str) -> None:
    result = Accuracy(10, right, 10, 3, class_counts=counts)
    assert result.majority_top1 == 10.0 * max(counts)
    found = result.no_better_than_one_answer(["well", "ill"])
    assert found.endswith(said)
    assert bool(found) == bool(said)


def test_unreadable_images_are_listed_and_not_replaced(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "0.png").write_bytes(b"not a picture")
    whole = (folder / "cat" / "1.png").read_bytes()
    (folder / "cat" / "1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "bee" / "3.png").write_bytes(b"")
    result = measure(write_tar(folder, tmp_path / "p.tar"))
    assert (result.images, result.correct1) == (9, 7)
    assert result.skipped == ("ant/0.png", "bee/3.png", "cat/1.png")
    for file in folder.rglob("*.png"):
        file.write_bytes(b"x")
    with pytest.raises(RetrofitError, match="none of the 12 images can be read"):
        measure(folder)


@pytest.mark.parametrize("batch_size", [10**9, 10**18])
def test_a_batch_beyond_the_memory_is_refused_before_it_is_read(
    folder: Path, batch_size: int
) -> None:
    assert measure(folder, batch_size=batch_size).images == 12  # all there are
    data = open_images(folder)
    endless = replace(data, images=Subset(data.images, range(12, 10**10)))
    with pytest.raises(RetrofitError, match="images do not fit into the memory; lower"):
        evaluate(Colours(), endless, PLAIN, batch_size=batch_size, workers=0)


class Answers(nn.Module):  # gives whatever it is told to
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(x)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), MemoryError()])
def test_a_device_that_is_full_says_what_to_do(folder: Path, error: Exception) -> None:
    def answer(_: Tensor) -> Tensor:
        raise error

    with pytest.raises(
        RetrofitError, match=r"^batches of 12 images do not fit into the memory; lower"
    ):
        evaluate(Answers(answer), open_images(folder), PLAIN, batch_size=16, workers=0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: {"out": x}, r"no class scores \(its output: dict\)"),
        (lambda x: x, "no class scores"),
        (lambda x: x[:, :2, 0, 0], "has class 2 .* gives 2 scores"),
    ],
)
def test_models_that_do_not_fit(folder: Path, answer: Any, message: str) -> None:
    with pytest.raises(RetrofitError, match=message):
        measure(folder, Answers(answer))


def test_progress_and_eval_mode_and_scores_that_are_not_finite(folder: Path) -> None:
    seen = []
    model = Answers(lambda x: torch.full((len(x), 3), torch.nan)).train()
    result = measure(folder, model, progress=lambda done, total: seen.append((done, total)))
    assert (result.correct1, result.correct5, result.not_finite) == (0, 0, 12)
    assert seen == [(5, 12), (10, 12), (12, 12)]
    assert not model.training


def test_precision_and_layout_reach_the_model(folder: Path) -> None:
    model, seen = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7)),
        [],
    )
    model[0].register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    measure(folder, model, amp=torch.bfloat16)
    assert seen.pop()[1].dtype == torch.bfloat16
    measure(folder, model, channels_last=True)
    assert seen.pop()[0].is_contiguous(memory_format=torch.channels_last)


def test_predictions_put_training_flags_back() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(12, 2))
    model[1].eval()
    predictions(model, [torch.zeros(1, 3, 2, 2)])
    assert [module.training for module in model.modules()] == [True, True, False, True]


# --- under attack, against classifiers whose strongest attack is known in closed form

MEANS, STDS = (0.2, 0.5, 0.6), (0.1, 0.3, 0.25)
MEAN, STD = torch.tensor(MEANS).view(3, 1, 1), torch.tensor(STDS).view(3, 1, 1)


def by_margin(margin: Callable[[Tensor], Tensor]) -> Answers:
    return Answers(lambda x: torch.stack([-margin(x), margin(x)], 1))


def linear(weight: Tensor) -> Answers:
    """Two classes by the sign of w . x, x the image from 0 to 1."""
    return by_margin(lambda x: (pixels(x).double() * weight).sum((1, 2, 3)))


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
    changed = Attack(kind, 0.05, MEANS, STDS)(linear(weight), normalized(image), labels)
    sign = torch.where(labels == 1, -1.0, 1.0).view(-1, 1, 1, 1) * weight.sign()
    torch.testing.assert_close((pixels(changed) - image).double(), 0.05 * sign, rtol=0, atol=1e-6)
    bright = normalized(torch.full((1, 3, 4, 4), 0.98))  # pixels stay pixels
    changed = Attack(kind, 0.05, MEANS, STDS)(linear(weight.abs()), bright, torch.tensor([0]))
    torch.testing.assert_close(changed, normalized(torch.ones(1, 3, 4, 4)))


def test_pgd_follows_a_bend_that_fgsm_does_not() -> None:
    """|x - 0.5| falls first and rises then: one full step goes past the bottom, ten small ones stay
    there.
    """

    bent = by_margin(lambda x: -5 * (x - 0.5).abs().sum((1, 2, 3)))
    image, label = torch.full((1, 1, 1, 1), 0.54), torch.tensor([0])
    by = {
        kind: Attack(kind, 0.1, (0.0,), (1.0,))(bent, image, label).item()
        for kind in ("fgsm", "pgd")
    }
    assert by["fgsm"] == pytest.approx(0.44)
    assert abs(by["pgd"] - 0.5) < 0.1 / 4


def test_scores_that_an_attack_makes_infinite_are_wrong() -> None:
    class Overflows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            score = x.flatten(1).sum(1, keepdim=True)
            return torch.cat([1 - score, score / (score < 0.5)], 1)

    image, label = torch.full((1, 1, 1, 1), 0.45), torch.tensor([0])
    attack = Attack("fgsm", 0.1, (0.0,), (1.0,))
    scores = Overflows()(attack(Overflows(), image, label))
    assert not scores.isfinite().all()
    as_first = nn.Sequential(Overflows(), nn.Softmax(1))  # NaN, whose largest is the first
    assert as_first(attack(Overflows(), image, label)).argmax(1) == label
    assert attack.resisted(as_first, image, label) == 0


def test_the_accuracy_stands_beside_the_clean_one(folder: Path) -> None:
    model = Answers(lambda x: 20 * x.mean((2, 3)))
    clean = measure(folder, model)
    assert (clean.attacked1, clean.attacked_top1) == (None, None)
    weak, strong = (
        measure(folder, model, attack=attack_on(PLAIN, "pgd", eps)) for eps in (1 / 255, 1.0)
    )
    assert weak.correct1 == strong.correct1 == clean.correct1
    assert strong.attacked_top1 < weak.attacked_top1 == clean.top1
