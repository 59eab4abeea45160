"""Accuracy against pictures whose right answers are known, and images that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError
from retrofit.evaluation.accuracy import evaluate, predictions
from retrofit.images.dataset import open_images
from retrofit.record import Preprocess
from tests.pictures import Colours, write_folder, write_tar

PLAIN = Preprocess((3, 16, 16), (0.0,) * 3, (1.0,) * 3, "nearest", 1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures")


def measure(data_dir: Path, model: nn.Module | None = None, **options: Any) -> Any:
    data = open_images(data_dir, class_map=options.pop("class_map", None))
    return evaluate(model or Colours(), data, PLAIN, **{"workers": 0, "batch_size": 5, **options})


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 0), (5, 1)])
def test_counts_of_a_folder(folder: Path, batch_size: int, workers: int) -> None:
    result = measure(folder, batch_size=batch_size, workers=workers)
    assert (result.images, result.correct1, result.correct5, result.outputs) == (12, 10, 12, 7)
    assert (result.top1, result.top5) == (pytest.approx(100 * 10 / 12), 100)
    palette = Colours().palette  # the colour of a picture is its class's, but for two bees that look like ants
    scores = torch.full((3, 7), -9.0).double()
    scores[:, :3] = -torch.cdist(palette, palette).double()
    each = -scores.log_softmax(dim=1)
    wanted = (4 * each[0, 0] + 2 * each[0, 1] + 2 * each[1, 1] + 4 * each[2, 2]) / 12
    assert result.loss == pytest.approx(float(wanted), rel=1e-5)


def test_classes_find_their_outputs(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "map.txt").write_text("cat\ndog\nant\nelk\nbee")
    model = Colours(5, places=(2, 4, 0))
    assert measure(folder, model, class_map=tmp_path / "map.txt").correct1 == 10
    assert measure(folder, model).correct1 != 10


def test_unreadable_images_are_listed_and_not_replaced(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "0.png").write_bytes(b"not a picture")
    whole = (folder / "cat" / "1.png").read_bytes()
    (folder / "cat" / "1.png").write_bytes(whole[: len(whole) // 2])
    (folder / "bee" / "3.png").write_bytes(b"")
    result = measure(write_tar(folder, tmp_path / "p.tar"))
    assert (result.images, result.correct1) == (9, 7)
    assert result.skipped == ("ant/0.png", "bee/3.png", "cat/1.png")


def test_no_readable_image_is_an_error(folder: Path) -> None:
    for file in folder.rglob("*.png"):
        file.write_bytes(b"x")
    with pytest.raises(RetrofitError, match="none of the 12 images can be read"):
        measure(folder)


def test_grey_images(folder: Path) -> None:
    class Bright(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[1:] == (1, 16, 16)
            return x.mean((1, 2, 3))[:, None] * torch.tensor([1.0, 0.0, 0.0])

    grey = Preprocess((1, 16, 16), (0.0,), (1.0,), "nearest", 1.0)
    assert evaluate(Bright(), open_images(folder, channels=1), grey, workers=0).images == 12


class Answers(nn.Module):
    """Gives whatever it is told to."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(x)


def test_scores_that_are_not_finite_count_as_wrong(folder: Path) -> None:
    result = measure(folder, Answers(lambda x: torch.full((len(x), 3), torch.nan)))
    assert (result.correct1, result.correct5, result.not_finite) == (0, 0, 12)


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


def test_progress_and_eval_mode_with_fewer_than_five_outputs(folder: Path) -> None:
    seen = []
    model = Answers(lambda x: torch.zeros(len(x), 3)).train()
    measure(folder, model, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(5, 12), (10, 12), (12, 12)]
    assert not model.training


def test_precision_and_layout_reach_the_model(folder: Path) -> None:
    model, seen = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7)), []
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
