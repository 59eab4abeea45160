"""Which files are images of which class, and what their pixels are: no file is dropped or counted twice."""

import gzip
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from retrofit.errors import RetrofitError
from retrofit.images.dataset import open_images
from retrofit.images.image_files import ImageFiles
from tests.networks.conftest import refused
from tests.pictures import write_folder, write_tar


def read(place: Path, **options: Any) -> list[tuple[str, Any, int]]:
    """Open all images of a folder or tar: name, pixels, target."""
    images = open_images(place, **options).images
    images.transform = np.asarray
    return [(images._reader.filename(n), *images[n]) for n in range(len(images))]


def assert_same_images(place: Path, other: Path) -> None:
    ours, theirs = ([(name, pixels.tolist(), target) for name, pixels, target in read(one)] for one in (place, other))
    assert ours == theirs


def test_names_and_classes_are_in_natural_order(tmp_path: Path) -> None:
    for name in ("b/10.png", "b/9.png", "B/1.png", "a10/x/1.JPG", "a9/1.png", "a9/notes.txt", "0.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    files = ImageFiles(tmp_path / "data")
    names = ["0.png", "a9/1.png", "a10/x/1.JPG", "B/1.png", "b/9.png", "b/10.png"]
    assert [files.filename(n) for n in range(len(files))] == names
    assert files.classes == ["", "a9", "B", "b", "x"]
    assert [files.classes[files[n][1]] for n in range(len(files))] == ["", "a9", "x", "B", "b", "b"]
    assert ImageFiles(tmp_path / "data", topmost=True).classes == ["B", "a10", "a9", "b"]


def test_a_link_to_the_folder_above_counts_nothing_twice(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "up").symlink_to(folder)
    (folder / "ant" / "further up").symlink_to(tmp_path)
    assert len(ImageFiles(folder)) == 12
    assert ImageFiles(folder).classes == ["ant", "bee", "cat"]


def test_two_paths_to_one_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "dog").symlink_to(folder / "bee")
    with pytest.raises(RetrofitError, match=r"bee and cat/dog in .* are the same folder .* twice; remove"):
        ImageFiles(folder)


def test_a_folder_that_cannot_be_read_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bee" / "inside").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if path.endswith("inside"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # chmod does not stop root, who may run the tests
    with pytest.raises(RetrofitError, match=r"cannot read the folder .*/bee/inside \(Permission denied\)"):
        open_images(folder)


def test_a_folder_without_images_is_said_to_be_no_class(folder: Path) -> None:
    (folder / "dog").mkdir()
    (folder / "dog" / "notes.txt").touch()
    data = open_images(folder)
    assert data.names == ("ant", "bee", "cat")
    assert data.notes == ("no image in dog: no class of its own",)


def test_what_is_no_regular_file_is_unreadable_and_not_opened(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "ant" / "8.png")
    (folder / "ant" / "9.png").symlink_to(tmp_path / "absent")
    assert [name for name, _, target in read(folder) if target < 0] == ["ant/8.png", "ant/9.png"]


def test_images_of_every_format_count_and_unknown_ones_are_listed(folder: Path) -> None:
    picture = Image.new("RGB", (40, 30), (10, 10, 250))
    for suffix in ("gif", "webp", "tif", "bmp"):
        picture.save(folder / "cat" / f"9.{suffix}")
    (folder / "cat" / "9.heic").write_bytes(b"of a telephone")
    found = {name: (pixels, target) for name, pixels, target in read(folder)}
    assert len(found) == 17
    assert [name for name, (_, target) in found.items() if target < 0] == ["cat/9.heic"]
    for suffix in ("gif", "webp", "tif", "bmp"):
        pixels, target = found[f"cat/9.{suffix}"]
        assert target == 2
        assert abs(pixels[0, 0].astype(int) - (10, 10, 250)).max() < 8


STEPS = np.arange(0, 256, 5, dtype=np.uint8)[None].repeat(4, 0)


@pytest.mark.parametrize(("suffix", "channels"), [("png", 1), ("png", 3), ("tif", 1), ("pgm", 1)])
def test_16_bits_are_scaled_to_8(tmp_path: Path, suffix: str, channels: int) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    wide = STEPS.astype(np.uint16) * 257
    if suffix == "pgm":
        (tmp_path / "data/a/0.pgm").write_bytes(b"P5 52 4 65535\n" + wide.astype(">u2").tobytes())
    else:
        Image.fromarray(wide).save(tmp_path / "data" / "a" / f"0.{suffix}")
    ((_, pixels, target),) = read(tmp_path / "data", channels=channels)
    assert target == 0
    assert np.array_equal(pixels, STEPS if channels == 1 else np.stack([STEPS] * 3, axis=2))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_an_unknown_range_are_refused(tmp_path: Path, dtype: Any) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    Image.fromarray(STEPS.astype(dtype)).save(tmp_path / "data" / "a" / "0.tif")
    assert read(tmp_path / "data")[0][2] < 0


def test_a_tar_is_read_as_its_folder_by_any_process(folder: Path, tmp_path: Path) -> None:
    tar = write_tar(folder, tmp_path / "p.tar")
    assert_same_images(tar, folder)
    images = open_images(tar).images
    images.transform = np.array
    images[0]  # what one process has read must not matter to those that start from it
    helped = DataLoader(images, batch_size=None, num_workers=2, multiprocessing_context="fork")
    expected = [(pixels.tolist(), target) for _, pixels, target in read(tar)]
    assert [(pixels.tolist(), target) for pixels, target in helped] == expected


def test_a_tar_of_tars_has_a_class_each_and_links_have_what_they_link_to(folder: Path, tmp_path: Path) -> None:
    for name in ("bee", "ant"):
        write_tar(folder / name, tmp_path / f"{name}.tar")
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for name in ("bee", "ant"):
            tar.add(tmp_path / f"{name}.tar", f"./{name}.tar")
        os.link(folder / "cat" / "0.png", folder / "cat" / "1b.png")
        tar.add(folder / "cat", "cat")
    assert_same_images(tmp_path / "all.tar", folder)


def file_of(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / name).write_bytes(content)
        return place / name

    return make


def damaged_tar(place: Path) -> Path:
    path = write_tar(write_folder(place / "pictures"), place / "data.tar")
    content = bytearray(path.read_bytes())
    content[2048:2058] = b"0123456789"  # the second header: tarfile would take the rest for empty
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda place: place, r"no images found in .* \(.png, .jpg, .*\); give a folder or tar"),
        (lambda place: write_tar(place, place / "data.tar"), r"no images found in .*data.tar \(.png, .jpg"),
        (file_of("data.tar", b""), r"no images found in .*data.tar \(empty file\)"),
        (file_of("data.zip", b"hello"), "data.zip, which is neither a folder nor a .tar"),
        (file_of("data.tar", gzip.compress(b"x")), r"data.tar is compressed; decompress it to a "),
        (damaged_tar, r"no images found in .*data.tar \(damaged at byte 2,048\)"),
    ],
)
def test_data_without_images(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with refused(message):
        open_images(make(tmp_path))
