"""Opening labelled images: what is found, what is refused, and which images a sample takes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch.utils.data import DataLoader

from retrofit.errors import RetrofitError
from retrofit.evaluation.accuracy import predictions
from retrofit.images.dataset import open_images, sample_batches
from retrofit.networks.library import Preprocess
from tests.pictures import Colours, write_folder, write_tar

PLAIN = Preprocess((3, 16, 16), (0.0,) * 3, (1.0,) * 3, "nearest", 1.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "pictures")


def test_missing_data(tmp_path: Path) -> None:
    with pytest.raises(RetrofitError, match="there is no data at"):
        open_images(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["empty folder", "no images", "empty tar", "not a tar", "file"])
def test_data_without_images(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "data"
    if kind in ("empty folder", "no images"):
        place.mkdir()
        if kind == "no images":
            (place / "notes.txt").write_text("hello")
    elif kind == "empty tar":
        place = write_tar(tmp_path / "absent", tmp_path / "data.tar")
    else:
        place = tmp_path / ("data.tar" if kind == "not a tar" else "data.zip")
        place.write_bytes(b"hello")
    with pytest.raises(RetrofitError, match="no images found in") as caught:
        open_images(place)
    assert "\n" not in str(caught.value)


def test_a_class_that_the_class_map_lacks(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "map.txt").write_text("ant\ncat\n")
    with pytest.raises(RetrofitError, match=r"1 of the data's 3 classes are not in .*map.txt \(bee\)"):
        open_images(folder, class_map=tmp_path / "map.txt")


@pytest.mark.parametrize("name", ["absent.txt", "map.csv"])
def test_an_unreadable_class_map(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "map.csv").write_text("ant,0\n")
    with pytest.raises(RetrofitError, match="cannot read the class map"):
        open_images(folder, class_map=tmp_path / name)


def test_channels_that_images_do_not_have(folder: Path) -> None:
    with pytest.raises(RetrofitError, match="takes 4 channels"):
        open_images(folder, channels=4)


def test_samples_spread_over_the_classes(folder: Path) -> None:
    batches = sample_batches(folder, PLAIN, images=6, batch_size=4)
    assert [tuple(batch.shape) for batch in batches] == [(4, 3, 16, 16), (2, 3, 16, 16)]
    assert predictions(Colours(), batches) == [0, 0, 0, 1, 2, 2]  # the first two bees look like ants
    assert sum(map(len, sample_batches(folder, PLAIN))) == 12


def test_an_unreadable_sample_is_an_error(folder: Path) -> None:
    (folder / "ant" / "0.png").write_bytes(b"")
    with pytest.raises(RetrofitError, match=r"cannot read ant/0.png"):
        sample_batches(folder, PLAIN)


@pytest.mark.parametrize(
    ("labels", "contradicted"),
    [(None, False), (["cat", "bee", "ant"], False), (["ant", "bat", "bee"], True), (["ant", "bee"], True)],
    ids=str,
)
def test_labels_that_classes_taken_by_order_contradict(
    labels: list[str] | None, contradicted: bool, tmp_path: Path
) -> None:
    assert open_images(write_folder(tmp_path / "pictures"), labels=labels).contradicts(labels) is contradicted


def test_processes_do_not_share_a_place_in_a_tar(tmp_path: Path) -> None:
    """What one reads before the others start would be open in all of them: they would read each other's images."""
    generator = np.random.default_rng(0)
    for number in range(12):
        (tmp_path / "pictures" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        noise = generator.integers(0, 256, (150, 150, 3), np.uint8)  # larger than what a file keeps in memory
        Image.fromarray(noise).save(tmp_path / "pictures" / "ab"[number % 2] / f"{number}.png")
    images = open_images(write_tar(tmp_path / "pictures", tmp_path / "pictures.tar")).images
    images.transform = create_transform(**PLAIN.to_dict())
    images[0]
    place = images._reader.tar_state.tf.fileobj.fileno()
    before = os.lseek(place, 0, os.SEEK_CUR)
    found = list(DataLoader(images, batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert os.lseek(place, 0, os.SEEK_CUR) == before
    for number, (image, target) in enumerate(found):
        own, wanted = images[number]
        assert int(target) == wanted >= 0
        assert torch.equal(image, own)
    images._reader.tar_state.tf.close()
