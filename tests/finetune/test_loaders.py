"""Order, augmentation and division of the images."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import ImageFolder

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.data import open_data
from retrofit.finetune.loaders import Batches, Order, Part, training_transform
from retrofit.finetune.recipe import Recipe
from retrofit.images import dataset
from retrofit.images.dataset import open_images
from retrofit.record import Preprocess

PREPROCESS = Preprocess((3, 16, 16), (0.5,) * 3, (0.5,) * 3)


def recipe(pictures: Path, **settings: Any) -> Recipe:
    return Recipe(
        **{"data_dir": str(pictures), "batch_size": 4, "workers": 0, "aa": "rand-m9", "reprob": 0.5, **settings}
    )


def batches(settings: Recipe, rank: int = 0, world: int = 1) -> Batches:
    images = open_data(settings, None, 3).train.images
    return Batches(images, training_transform(settings, PREPROCESS), settings, rank, world)


def test_an_epoch_holds_every_image_once_and_the_processes_share_it() -> None:
    shares = [list(Order(22, 3, rank, 2, seed=1)) for rank in range(2)]
    whole = list(Order(22, 6, 0, 1, seed=1))
    assert [a + b for a, b in zip(*shares, strict=True)] == whole
    drawn = [index for batch in whole for _, index in batch]
    assert len(drawn) == len(set(drawn)) == 18  # what makes no whole batch is left out


def test_epochs_and_seeds_differ() -> None:
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        order = Order(32, 8, 0, 1, seed)
        order.epoch = epoch
        orders.append([index for batch in order for _, index in batch])
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_the_pictures_do_not_depend_on_workers_start_or_what_was_drawn_before(pictures: Path) -> None:
    alone, helped = batches(recipe(pictures, val_split=0.0)), batches(recipe(pictures, val_split=0.0, workers=2))
    before = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    one = list(alone.epoch(3))
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])
    torch.rand(5)
    other = list(helped.epoch(3, start=2))
    assert len(one) == len(alone) == 6
    assert len(other) == 4
    for (images, targets), (same, too) in zip(one[2:], other, strict=True):
        assert torch.equal(images, same)
        assert torch.equal(targets, too)


def test_a_signal_to_the_whole_group_leaves_the_decoders_at_work(pictures: Path) -> None:
    epoch = batches(recipe(pictures, val_split=0.0, workers=1)).epoch(0)
    next(epoch)
    for worker in multiprocessing.active_children():
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    assert len(list(epoch)) == 5


def test_two_processes_augment_as_one_does(pictures: Path) -> None:
    whole = next(batches(recipe(pictures, val_split=0.0)).epoch(0))[0]
    halves = [next(batches(recipe(pictures, val_split=0.0, batch_size=2), rank, 2).epoch(0))[0] for rank in (0, 1)]
    assert torch.equal(whole, torch.cat(halves))


def test_held_out_images_are_not_trained_on(pictures: Path) -> None:
    data = open_data(recipe(pictures, val_split=0.25), None, 3)
    assert data.val is not None
    train, held = set(data.train.images.indices), set(data.val.images.indices)
    assert (len(train), len(held)) == (18, 6)
    assert not train & held
    assert data.names == ("ant", "bee", "cat")


def test_a_part_of_a_part_has_a_transform_of_its_own(pictures: Path) -> None:
    images = open_images(pictures).images
    for part in (Part(images), Part(images, targets=[2] * 24)):
        part.transform = lambda image: "mine"
        other = Part(part, range(1))
        other.transform = lambda image: "other"
        assert (part[0][0], other[0][0]) == ("mine", "other")
        assert other[0][1] == part[0][1]


def test_without_a_part_to_validate_on_a_tenth_is_held_out(pictures: Path) -> None:
    data = open_data(recipe(pictures), None, 3)
    assert data.val is not None
    assert len(data.val.images) == 2
    assert "no part to validate on" in data.notes[0]


def test_sub_folders_are_parts(pictures: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    pictures.rename(root / "train")
    (root / "val" / "ant").mkdir(parents=True)
    for name in ("bee", "cat"):
        (root / "val" / name).mkdir()
    (root / "train" / "ant" / "0.png").rename(root / "val" / "ant" / "0.png")
    data = open_data(recipe(root), None, 3)
    assert data.val is not None
    assert (len(data.train.images), len(data.val.images), data.notes) == (23, 1, ())


@pytest.mark.parametrize("labels", [None, ["cat", "bee", "ant"], ["x", "y", "z"]], ids=str)
def test_classes_that_the_part_to_validate_on_lacks_move_no_others(
    labels: list[str] | None, pictures: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for part in ("train", "val"):
        shutil.copytree(pictures, root / part)
    shutil.rmtree(root / "val" / "ant")
    data = open_data(recipe(root), labels, 3)
    assert data.val is not None
    assert data.names is not None
    data.val.images.transform = np.asarray
    found = {np.argmax(image[0, 0]).item(): target for image, target in (data.val.images[n] for n in (15, 7))}
    assert found == {1: data.names.index("bee"), 2: data.names.index("cat")}  # by colour


def test_other_classes_to_validate_on_are_refused(pictures: Path, tmp_path: Path) -> None:
    for part in ("train", "val"):
        shutil.copytree(pictures, tmp_path / "root" / part)
    shutil.rmtree(tmp_path / "root" / "train" / "ant")
    with pytest.raises(RetrofitError, match=r"classes of 'val\w*' are not those of 'train' \(ant\)"):
        open_data(recipe(tmp_path / "root"), None, 3)


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        (("Train", "val"), {}, r"no part 'train', but Train, val; give `train_split`"),
        (("Train", "val"), {"val_split": 0.25}, "no part 'train', but Train, val;"),
        (("Train", "test"), {}, "no part 'train', but Train, test;"),
        (("", "exam"), {"val_split": "exam"}, "no part 'train', but exam;"),
        (("train", "val"), {"train_split": "trian"}, "no part 'trian', but train, val;"),
        (("",), {"train_split": "trian"}, "no part 'trian'; give `train_split`"),
    ],
)
def test_images_to_validate_on_are_not_trained_on(
    parts: tuple[str, ...], settings: dict[str, Any], message: str, pictures: Path, tmp_path: Path
) -> None:
    """Without the part to train on, timm would read all of the folder."""
    for part in parts:
        shutil.copytree(pictures, tmp_path / "root" / part, dirs_exist_ok=True)
    with pytest.raises(UsageError, match=message):
        open_data(recipe(tmp_path / "root", **settings), None, 3)


@pytest.mark.parametrize("setting", ["train_split", "val_split"])
def test_other_words_for_parts_of_the_digits_are_refused(setting: str) -> None:
    with pytest.raises(UsageError, match=f"the data has no part 'exam'.*; give `{setting}`"):
        open_data(Recipe(dataset="digits", **{setting: "exam"}), None, 3)


def test_a_torchvision_dataset(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "val"):
        shutil.copytree(pictures, tmp_path / "root" / part)
    parts = {"train": "train", "validation": "val"}
    monkeypatch.setattr(
        dataset, "create_dataset", lambda *_, split, **__: ImageFolder(tmp_path / "root" / parts[split])
    )
    settings = recipe(tmp_path / "root", dataset="torch/cifar10")
    data = open_data(settings, ["cat", "bee", "ant"], 3)
    assert data.val is not None
    assert (data.outputs, data.names, len(data.val.images)) == (3, ("cat", "bee", "ant"), 24)
    assert {data.val.images[number][1] for number in (0, 1)} == {2}  # ants
    images, targets = next(batches(settings).epoch(0))
    assert images.shape == (4, 3, 16, 16)
    assert targets.max() < 3


def test_random_batches_hold_every_class(pictures: Path) -> None:
    """The images lie sorted by class: batches of neighbours would have one class each, and too small a variance."""
    part = Part(open_images(pictures).images)
    part.transform = lambda image: torch.from_numpy(np.array(image))
    found = list(part.batches(17, 6, seed=1, device=torch.device("cpu")))
    assert [len(batch) for batch in found] == [6, 6, 5]
    assert all(len({image[0, 0].argmax().item() for image in batch}) > 1 for batch in found)
    for batch, same in zip(found, part.batches(17, 6, seed=1, device=torch.device("cpu")), strict=True):
        assert torch.equal(batch, same)


def test_labels_of_the_network_are_used_where_they_are_the_data_s(pictures: Path) -> None:
    same = open_data(recipe(pictures), ["cat", "bee", "ant"], 3)
    assert (same.outputs, same.names) == (3, ("cat", "bee", "ant"))
    fewer = open_data(recipe(pictures), ["cat", "bee", "ant", "dog"], 3)
    assert (fewer.outputs, fewer.names) == (3, ("ant", "bee", "cat"))
    for settings in ({"teacher": "source"}, {"num_classes": 4}):  # either keeps the classifier
        kept = open_data(recipe(pictures, **settings), ["cat", "bee", "ant", "dog"], 3)
        assert (kept.outputs, kept.names) == (4, ("cat", "bee", "ant", "dog"))


def test_a_class_map_decides_the_outputs(pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "map.txt").write_text("cat\nbee\ndog\nant\n")
    data = open_data(recipe(pictures, class_map=str(tmp_path / "map.txt")), None, 3)
    assert (data.outputs, data.names) == (4, ("cat", "bee", "dog", "ant"))


def test_digits_are_always_divided_alike() -> None:
    train, held = (open_images(None, dataset="digits", split=split).images for split in ("train", "validation"))
    assert (len(train), len(held)) == (1437, 360)
    train.transform = held.transform = lambda image: np.asarray(image).tobytes()
    assert len({train[number][0] for number in range(1437)} & {held[number][0] for number in range(360)}) == 0
    assert sorted({held[number][1] for number in range(360)}) == list(range(10))


@pytest.mark.parametrize(
    ("settings", "error", "pattern"),
    [
        ({"data_dir": "nowhere"}, RetrofitError, "no data at nowhere"),
        ({"data_dir": None}, UsageError, "nothing to read images from"),
        ({"val_split": "testing"}, UsageError, "no part 'testing'"),
        ({"val_split": 0.001}, RetrofitError, "leaves none"),
        ({"aa": "nonsense"}, UsageError, "cannot build the augmentation"),
        ({"batch_size": 4, "val_split": 0.0, "world": 30}, RetrofitError, "too few for 30 processes"),
    ],
)
def test_refusals(pictures: Path, settings: dict[str, Any], error: type[Exception], pattern: str) -> None:
    world = settings.pop("world", 1)
    with pytest.raises(error, match=pattern):
        batches(recipe(pictures, **settings), 0, world)


def test_a_stream_is_refused(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    monkeypatch.setattr(dataset, "create_dataset", lambda *_, **__: Stream())
    with pytest.raises(UsageError, match="wds/pictures is a stream"):
        open_data(recipe(pictures, dataset="wds/pictures"), None, 3)


def test_a_flat_folder_has_no_classes_to_learn(tmp_path: Path, pictures: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    (pictures / "ant" / "0.png").rename(flat / "a.png")
    with pytest.raises(RetrofitError, match="a single class"):
        open_data(recipe(flat), None, 3)
