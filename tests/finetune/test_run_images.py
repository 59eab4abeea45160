"""Division of the images into those to train on and those to validate on."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import ImageFolder

from retrofit.errors import RetrofitError, UsageError
from retrofit.finetune.recipe import Recipe
from retrofit.finetune.run_images import Images, ImageSubset, open_data
from retrofit.images import dataset
from retrofit.images.dataset import open_images
from tests.finetune.test_batches import batches
from tests.pictures import write_tar


def data(pictures: Path | None, labels: list[str] | None = None, **settings: Any) -> Images:
    return open_data(Recipe(data_dir=pictures and str(pictures), **settings), labels, 3)


def parts(
    root: Path, pictures: Path, *names: str
) -> Path:  # copy the pictures into folders of these names
    for name in names:
        shutil.copytree(pictures, root / name, dirs_exist_ok=True)
    return root


def test_held_out_images_are_not_trained_on(pictures: Path) -> None:
    for settings, held_out in (({"val_split": 0.25}, 6), ({}, 2)):  # a tenth where nothing is said
        images = data(pictures, **settings)
        train, held = set(images.train.images.indices), set(images.val.images.indices)
        assert (len(train), len(held)) == (24 - held_out, held_out)
        assert not train & held
        assert images.names == ("ant", "bee", "cat")
        assert bool(images.notes) == (not settings)


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({"train_split": "."}, True),
        ({"val_split": "."}, True),
        ({"val_split": "train"}, True),
        ({"train_split": ".", "val_split": 0.25}, False),
        ({}, False),
    ],
)
def test_images_that_are_trained_on_and_validated_on_are_warned_of(
    settings: dict[str, Any], shared: bool, pictures: Path, tmp_path: Path
) -> None:
    images = data(parts(tmp_path / "root", pictures, "train", "val"), **settings)
    warned = [note for note in images.notes if note.startswith("warning: the splits")]
    assert len(warned) == shared


def test_a_part_of_a_part_has_a_transform_of_its_own(pictures: Path) -> None:
    images = open_images(pictures).images
    for targets in (None, [2] * 24):
        subset = ImageSubset(images, transform=lambda image: "mine")
        subset.targets = targets
        other = ImageSubset(subset, range(1), lambda image: "other")
        assert (subset[0][0], other[0][0]) == ("mine", "other")
        assert other[0][1] == subset[0][1]


@pytest.mark.parametrize("labels", [None, ["cat", "bee", "ant"], ["x", "y", "z"]], ids=str)
def test_classes_that_validation_lacks_move_no_others(
    labels: list[str] | None, pictures: Path, tmp_path: Path
) -> None:
    root = parts(tmp_path / "root", pictures, "train", "val")
    shutil.rmtree(root / "val" / "ant")
    images = data(root, labels)
    assert (len(images.train.images), len(images.val.images), images.notes) == (24, 16, ())
    images.val.images.transform = np.asarray
    found = {
        np.argmax(image[0, 0]).item(): target
        for image, target in (images.val.images[n] for n in (15, 7))
    }
    assert found == {1: images.names.index("bee"), 2: images.names.index("cat")}  # by colour


def test_other_classes_to_validate_on_are_refused(pictures: Path, tmp_path: Path) -> None:
    root = parts(tmp_path / "root", pictures, "train", "val")
    shutil.rmtree(root / "train" / "ant")
    with pytest.raises(
        RetrofitError, match=r"classes of 'val\w*' are not those of 'train' \(ant\)"
    ):
        data(root)


def test_a_torchvision_dataset(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = parts(tmp_path / "root", pictures, "train", "validation")
    monkeypatch.setattr(
        dataset, "create_dataset", lambda *_, split, **__: ImageFolder(root / split)
    )
    images = data(root, ["cat", "bee", "ant"], dataset="torch/cifar10")
    assert (images.names, len(images.val.images)) == (("cat", "bee", "ant"), 24)
    images.val.images.transform = torch.nn.Identity()
    assert {images.val.images[number][1] for number in (0, 1)} == {2}  # ants
    pixels, targets = next(batches(root, dataset="torch/cifar10").epoch(0))
    assert pixels.shape == (4, 3, 16, 16)
    assert targets.max() < 3


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_torchvision_dataset_has_the_channels_that_are_asked_for(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, channels: int, mode: str
) -> None:
    (pictures / "ant" / "0.png").write_bytes(b"no picture")
    monkeypatch.setattr(dataset, "create_dataset", lambda *_, **__: ImageFolder(pictures))
    images = open_images(pictures, dataset="torch/mnist", split="train", channels=channels).images
    images.transform = torch.nn.Identity()
    (_, target), (image, _) = images[0], images[1]
    assert image.mode == mode
    assert images.unreadable(target) == "image 0"


def test_images_beside_the_classes_are_refused_in_training(pictures: Path, tmp_path: Path) -> None:
    """They would be a class without a name, the first of all."""
    shutil.copy(pictures / "ant" / "0.png", pictures / "cover.png")
    split = parts(tmp_path / "root", pictures, "train")
    for where in (pictures, split, write_tar(split, tmp_path / "all.tar")):
        with pytest.raises(RetrofitError, match=r"cover\.png lie beside the folders of the cl"):
            data(where)


def test_batches_to_measure_on_hold_every_class(pictures: Path) -> None:
    """The images lie sorted by class: batches of neighbours would have one class each, and too
    small a variance.
    """
    (pictures / "ant" / "0.png").write_bytes(b"no picture")
    subset = ImageSubset(
        open_images(pictures).images, transform=lambda image: torch.from_numpy(np.array(image))
    )
    found = list(subset.batches(17, 6))
    assert [len(batch) for batch in found] == [5, 6, 5]
    assert all(len({image[0, 0].argmax().item() for image in batch}) == 3 for batch in found)
    assert sum(map(len, subset.batches(100, 6))) == 23


@pytest.mark.parametrize(
    ("names", "settings", "error", "message"),
    [
        (("Train", "val"), {}, UsageError, r"no split 'train', but Train, val; give `train_split`"),
        (("Train", "val"), {"val_split": 0.25}, UsageError, "no split 'train', but Train, val;"),
        (("", "exam"), {"val_split": "exam"}, UsageError, "no split 'train'; give `train_split`"),
        (
            ("train", "val"),
            {"train_split": "trian"},
            UsageError,
            "no split 'trian', but train, val;",
        ),
        (
            ("",),
            {"train_split": "trian"},
            UsageError,
            "no split 'trian'; give `train_split` the name of one$",
        ),
        (
            (),
            {"data_dir": None, "dataset": "digits", "train_split": "exam"},
            UsageError,
            "'exam'.*`train_split`",
        ),
        (
            ("",),
            {"val_split": "testing"},
            UsageError,
            "no split 'testing'; give `val_split` the name of one, or a fraction$",
        ),
        (("",), {"val_split": 0.001}, RetrofitError, "leaves none"),
        (("",), {"aa": "nonsense"}, UsageError, "cannot build the augmentation"),
        (("",), {"world": 30}, RetrofitError, "too few for 30 processes"),
    ],
)
def test_refusals(
    names: tuple[str, ...],
    settings: dict[str, Any],
    error: Any,
    message: str,
    pictures: Path,
    tmp_path: Path,
) -> None:
    """Without the part to train on, timm would read all of the folder."""
    with pytest.raises(error, match=message):
        batches(
            parts(tmp_path / "root", pictures, *names), **{"val_split": "validation", **settings}
        )


def test_a_stream_and_a_flat_folder_are_refused(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dataset, "create_dataset", lambda *_, **__: torch.utils.data.ChainDataset([])
    )
    with pytest.raises(UsageError, match="wds/pictures is a stream"):
        data(pictures, dataset="wds/pictures")
    with pytest.raises(RetrofitError, match="a single class"):
        data(pictures / "ant")
