"""Opening labelled images: which files are images of which class and what their pixels are, and
what is refused.
"""

import gzip
import io
import os
import shutil
import tarfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from retrofit.errors import RetrofitError, UsageError
from retrofit.images import dataset as module
from retrofit.images.dataset import has_split, open_images
from retrofit.images.image_files import ImageFiles
from tests.networks.conftest import refused
from tests.pictures import COLOURS, write_folder, write_tar


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("nowhere", {}, "there is no data at"),
        ("pictures", {"dataset": "digits"}, "lie in no folder; drop `dataset` or `data_dir`"),
        ("pictures", {"channels": 4}, "model takes 4; build"),
        ("pictures", {"dataset": "cifar10"}, "unknown dataset 'cifar10'; .* or `data_dir` alone"),
        (None, {"dataset": "torch/cifar10"}, "torch/cifar10 is read from a folder; name it with"),
        ("pictures", {"dataset": "torch/folder"}, "torch/folder is a folder .*`data_dir` alone"),
        (
            "pictures",
            {"class_map": "absent.txt"},
            "there is no class map at absent.txt; give a .txt",
        ),
        ("pictures", {"class_map": "pipe.txt"}, r"pipe.txt is a pipe .*; give a .txt file"),
        ("pipe.tar", {}, r"pipe.tar is a pipe or a device; give a folder or tar"),
        (
            None,
            {"dataset": "digits", "class_map": "map.txt"},
            r"9 .* 10 classes are .* \(1, 2, 3 and 6 more",
        ),
    ],
)
def test_what_is_not_there(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str | None,
    options: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(folder.parent)
    os.mkfifo("pipe.txt")
    os.mkfifo("pipe.tar")
    Path("map.txt").write_text("0\nant\n")
    with pytest.raises(RetrofitError, match=message):
        open_images(place, **options)


@pytest.mark.parametrize(
    "labels", [None, ["cat", "bee", "ant"], ["ant", "bat", "bee"], ["ant", "bee"]], ids=str
)
def test_labels_that_classes_taken_by_order_contradict(
    labels: list[str] | None, folder: Path
) -> None:
    assert open_images(folder, labels=labels).contradicts(labels) is bool(
        labels and "cat" not in labels
    )


@pytest.mark.parametrize(
    ("parts", "split", "outcome"),
    [
        *(
            (("train", "test"), split, count)
            for split, count in (("test", 3), ("training", 3), (".", 6))
        ),
        (
            ("train", "test"),
            "validation",
            r"no split 'validation', but test, train; give `split` .* `split='\.'`",
        ),
        (("Train", "Val"), "validation", "no split 'validation', but Train, Val;"),
        (("train", "val"), "trian", "the data has no split 'trian', but train, val; give `split`"),
        (("",), "train", "the data has no split 'train'"),
        *((".tar", split, 3) for split in ("validation", ".")),  # it has no parts
        (".tar", "tset", "has no split 'tset'; give `split"),
        *(("digits", "training", 1437), ("digits", "val", 360)),
        ("digits", ".", "has no split '.'; give `split` train or validation$"),
        ("torch/cifar10", "tset", "has no split 'tset'; give `split` train or validation$"),
        ("torch/QMNIST", ".", "has no split '.'; give `split` train or validation$"),
    ],
    ids=str,
)
def test_parts(
    tmp_path: Path, parts: str | tuple[str, ...], split: str, outcome: int | str
) -> None:
    """All of the data in a part's place would hold what was trained on, or be the images held
    out.
    """
    for part in parts if isinstance(parts, tuple) else [""]:
        write_folder(tmp_path / "data" / part, each=1)
    dataset = "" if parts == ".tar" or isinstance(parts, tuple) else parts
    place = (
        write_tar(tmp_path / "data", tmp_path / "p.tar") if parts == ".tar" else tmp_path / "data"
    )
    with nullcontext() if isinstance(outcome, int) else pytest.raises(UsageError, match=outcome):
        data = open_images(None if dataset == "digits" else place, dataset=dataset, split=split)
        assert len(data.images) == outcome


def test_the_parts_of_a_named_dataset_are_not_looked_for_in_its_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no split 'tset'; give `split` train or validation$"):
        open_images(tmp_path / "not-yet-loaded", dataset="torch/cifar10", split="tset")


@pytest.mark.parametrize(
    ("split", "outcome"),
    [
        *(("train", 12), ("training", 12), ("val", 3), ("validation", 3), (".", 15)),
        ("test", "no split 'test', but train, val; give `split`"),
    ],
)
def test_parts_of_a_tar(tmp_path: Path, split: str, outcome: int | str) -> None:
    write_folder(tmp_path / "data" / "train", each=4)
    write_folder(tmp_path / "data" / "val", each=1)
    tar = write_tar(tmp_path / "data", tmp_path / "data.tar")
    with nullcontext() if isinstance(outcome, int) else pytest.raises(UsageError, match=outcome):
        data = open_images(tar, split=split)
        assert len(data.images) == outcome
        assert data.names == tuple(COLOURS)


@pytest.mark.parametrize("packed", [False, True])
def test_parts_in_a_folder_of_their_own_are_not_read_as_one(tmp_path: Path, packed: bool) -> None:
    for part in ("train", "val"):
        write_folder(tmp_path / "data" / "pets" / part, each=1)
    place = tmp_path / "data"
    if packed:
        place = write_tar(place, tmp_path / "data.tar")
    with pytest.raises(UsageError, match="no split 'validation', but pets/train, pets/val; give"):
        open_images(place)
    assert len(open_images(place, split="pets/val").images) == 3
    assert len(open_images(place, split=".").images) == 6


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("folders", "split", "images"),
    [
        # A class of trains.
        ("bee/a cat/a train/a", "train", None),
        ("bee/a cat/a train/a", "validation", 3),
        ("bee/a cat/a val/a", "validation", 3),
        ("pets/bee/a pets/test/a", "pets/test", None),
        # Splits without classes.
        ("train/a train/b val/a", "train", 2),
        ("train/a val/a", "validation", 1),
        ("train/bee/a train/cat/a val/a more/a", "validation", 1),
        ("fold1/a", "fold1", 1),
        # With classes, beside something else.
        ("more/a val/bee/a", "validation", 1),
        ("bee/a Val/a", "validation", 2),
    ],
)
def test_a_class_called_as_a_part_is_none(
    tmp_path: Path, packed: bool, folders: str, split: str, images: int | None
) -> None:
    for number, file in enumerate(folders.split()):
        path = tmp_path / "data" / f"{file}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)
    place = tmp_path / "data"
    if packed:
        place = write_tar(place, tmp_path / "data.tar")
    if images is None:
        with pytest.raises(UsageError, match=f"the data has no split '{split}'; give"):
            open_images(place, split=split)
    else:
        assert len(open_images(place, split=split).images) == images


def test_what_holds_no_image_makes_no_class_of_a_split(tmp_path: Path) -> None:
    for folder in ("train/.cache", "train/bee", "val", "annotations", ".git/bee"):
        (tmp_path / folder).mkdir(parents=True)
    Image.new("L", (4, 4)).save(tmp_path / ".git" / "bee" / "a.png")
    assert not has_split(tmp_path, "", "test")
    assert has_split(tmp_path, "", "train")
    with pytest.raises(RetrofitError, match=r"no images found in .*/val "):
        open_images(tmp_path)


def test_a_tar_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", each=1)
    tar = write_tar(tmp_path / "data", tmp_path / "data.tar")
    assert len(open_images(tar).images) == 3
    write_folder(tmp_path / "data" / "val", each=2)
    write_tar(tmp_path / "data", tar)
    assert len(open_images(tar).images) == 6


def test_some_datasets_check_the_names_of_their_parts_themselves() -> None:
    assert has_split(None, "torch/Places365", "train-challenge")
    assert not has_split(None, "torch/CIFAR10", "train-challenge")


def test_no_digit_is_in_both_parts() -> None:
    parts = [open_images(None, dataset="digits", split=split).images for split in ("train", "val")]
    for part in parts:
        part.transform = Image.Image.tobytes
    assert (
        len(
            {
                pixels
                for part in parts
                for pixels, _ in (part[number] for number in range(len(part)))
            }
        )
        == 1797
    )


def test_a_class_may_be_called_like_a_part(folder: Path) -> None:
    (folder / "bee").rename(folder / "train")
    assert open_images(folder).names == ("ant", "cat", "train")


@pytest.mark.parametrize(("dataset", "way"), [("digits", "class map"), ("", "labels")])
def test_classes_of_named_data_find_their_outputs(
    folder: Path, tmp_path: Path, dataset: str, way: str
) -> None:
    place = None if dataset == "digits" else folder
    plain = open_images(place, dataset=dataset)
    assert plain.names is not None
    outputs = ["other", *reversed(plain.names)]
    (tmp_path / "map.txt").write_text("\n".join(outputs))
    given: dict[str, Any] = (
        {"class_map": tmp_path / "map.txt"} if way == "class map" else {"labels": outputs}
    )
    data = open_images(place, dataset=dataset, **given)
    assert (data.matched, data.classes, data.outputs) == (way, len(plain.names), len(outputs))
    plain.images.transform = data.images.transform = np.asarray
    for number in range(0, len(plain.images), 5):
        assert outputs[data.images[number][1]] == plain.names[plain.images[number][1]]


def class_map(folder: Path, content: str) -> Path:
    path = folder / "map.txt"
    path.write_bytes(content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cat\n\nbee\nant\n", "'' on line 2"),
        ("\ncat\nbee\nant", "'' on line 1"),
        ("cat\nbee\nbee \nant\n", "'bee' on line 3; give each output, in order, one name of its"),
        ("", "'' on line 1"),
    ],
    ids=str,
)
def test_class_maps_that_would_shift_the_outputs(
    folder: Path, tmp_path: Path, content: str, message: str
) -> None:
    with refused(rf"the class map .*/map.txt has {message}"):
        open_images(folder, class_map=class_map(tmp_path, content))


def test_a_class_map_of_many_classes_is_read_once(tmp_path: Path) -> None:
    """ImageNet-22k's names, compared with one another, would take seconds."""
    compared: list[object] = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return str(self) == other

    names = [f"n{number:04d}" for number in range(500)]
    data = module.ImageData(
        SimpleNamespace(), classes=500, names=tuple(Name(name) for name in reversed(names))
    )
    mapped = data.mapped(class_map(tmp_path, "\n".join(names)))
    assert [mapped.images.target_transform(target) for target in (0, 499)] == [499, 0]
    assert len(compared) < 5000


def test_a_class_map_for_classes_without_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "create_dataset", lambda *_, **__: [])
    with pytest.raises(
        UsageError, match="torch/inat does not tell what its classes are called; drop `class_map`"
    ):
        open_images(tmp_path, dataset="torch/inat", class_map=class_map(tmp_path, "ant\n"))


@pytest.mark.parametrize(
    "content", ["cat\nbee\nant\n\n \n", "\ufeffcat\r\nbee\r\nant", "cat\r\nbee\r\nant\r\n"]
)
def test_class_maps(folder: Path, tmp_path: Path, content: str) -> None:
    data = open_images(folder, class_map=class_map(tmp_path, content))
    assert (data.names, data.outputs) == (("cat", "bee", "ant"), 3)


# --- files: none is dropped or counted twice


def read(place: Path, **options: Any) -> list[tuple[str, Any, int]]:
    """Open all images of a folder or tar: name, pixels, target."""
    images = open_images(place, **options).images
    images.transform = np.asarray
    return [(images._reader.filename(n), *images[n]) for n in range(len(images))]


def assert_same_images(place: Path, other: Path) -> None:
    ours, theirs = (
        [(name, pixels.tolist(), target) for name, pixels, target in read(one)]
        for one in (place, other)
    )
    assert ours == theirs


def test_names_and_classes_are_in_natural_order(tmp_path: Path) -> None:
    for name in (
        "b/10.png",
        "b/9.png",
        "B/1.png",
        "cm2²/1.png",  # a raised 2 is no number
        "a10/x/1.JPG",
        "a9/1.png",
        "a9/notes.txt",
        "0.png",
    ):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    files = ImageFiles(tmp_path / "data")
    names = ["0.png", "a9/1.png", "a10/x/1.JPG", "B/1.png", "b/9.png", "b/10.png"]
    names.append("cm2²/1.png")
    assert [files.filename(n) for n in range(len(files))] == names
    assert files.classes == ["", "a9", "B", "b", "cm2²", "x"]
    labels = ["", "a9", "x", "B", "b", "b", "cm2²"]
    assert [files.classes[files[n][1]] for n in range(len(files))] == labels


def test_a_link_to_the_folder_above_counts_nothing_twice(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "up").symlink_to(folder)
    (folder / "ant" / "further up").symlink_to(tmp_path)
    assert len(ImageFiles(folder)) == 12
    assert ImageFiles(folder).classes == ["ant", "bee", "cat"]


def test_two_paths_to_one_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "dog").symlink_to(folder / "bee")
    with pytest.raises(
        RetrofitError, match=r"bee and cat/dog in .* are the same folder .* twice; remove"
    ):
        ImageFiles(folder)


def test_a_folder_that_cannot_be_read_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "bee" / "inside").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("inside"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # chmod does not stop root, who may run the tests
    with pytest.raises(
        RetrofitError, match=r"cannot read the folder .*/bee/inside \(Permission denied\)"
    ):
        open_images(folder)


def test_a_folder_without_images_is_said_to_be_no_class(folder: Path) -> None:
    (folder / "dog").mkdir()
    (folder / "dog" / "notes.txt").touch()
    data = open_images(folder)
    assert data.names == ("ant", "bee", "cat")
    assert data.notes == ("no image in dog: no class of its own",)


def test_images_in_hidden_folders_are_no_class(folder: Path, tmp_path: Path) -> None:
    hidden = folder / "ant" / ".ipynb_checkpoints"
    hidden.mkdir()
    (folder / "ant" / "0.png").rename(hidden / "0-checkpoint.png")
    for root in (folder, write_tar(folder, tmp_path / "p.tar")):
        data = open_images(root)
        assert (data.names, len(data.images)) == (("ant", "bee", "cat"), 11)
        (note,) = data.notes
        assert note.startswith("1 image in hidden folders left out (ant/.ipynb_checkpoints/0")


def test_a_folder_and_its_tar_have_one_fingerprint(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "all" / "train")
    tar = write_tar(tmp_path / "all", tmp_path / "p.tar")
    found = {
        open_images(root, split=split).fingerprint
        for root, split in ((folder, "."), (tmp_path / "all", "train"), (tar, "train"))
    }
    assert len(found) == 1
    (folder / "ant" / "0.png").rename(folder / "ant" / "9.png")
    assert open_images(folder).fingerprint not in found


@pytest.mark.parametrize(("brightest", "levels"), [(4095, 16), (65535, None), (0, None)])
def test_16_bits_that_hold_12_are_said_to_lose_levels(
    tmp_path: Path, brightest: int, levels: int | None
) -> None:
    for name in ("ill", "well"):
        (tmp_path / name).mkdir()
        pixels = np.linspace(0, brightest, 64).astype(np.uint16).reshape(8, 8)
        for number in range(3):
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    (tmp_path / "ill" / "0.png").write_bytes(b"no picture")
    data = open_images(tmp_path, channels=1)
    if levels is None:
        assert not data.notes
    else:
        (note,) = data.notes
        assert f"no pixel above {brightest} of 65535, so that {levels} of 256 levels" in note


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


def test_a_large_image_is_read_without_a_word_and_a_larger_one_is_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    pixels = 40 * 30
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels - 1)
    assert all(target >= 0 for _, _, target in read(folder))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels // 2 - 1)
    assert all(target < 0 for _, _, target in read(folder))
    assert not recwarn.list


STEPS = np.arange(0, 256, 5, dtype=np.uint8)[None].repeat(4, 0)


@pytest.mark.parametrize(("suffix", "channels"), [("png", 1), ("png", 3), ("tif", 1), ("pgm", 1)])
def test_16_bits_are_scaled_to_8_and_an_unknown_range_is_refused(
    tmp_path: Path, suffix: str, channels: int
) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    wide = STEPS.astype(np.uint16) * 257
    if suffix == "pgm":
        (tmp_path / "data/a/0.pgm").write_bytes(b"P5 52 4 65535\n" + wide.astype(">u2").tobytes())
    else:
        Image.fromarray(wide).save(tmp_path / "data" / "a" / f"0.{suffix}")
    ((_, pixels, target),) = read(tmp_path / "data", channels=channels)
    assert target == 0
    assert np.array_equal(pixels, STEPS if channels == 1 else np.stack([STEPS] * 3, axis=2))
    for number, dtype in enumerate((np.int32, np.float32), start=1):
        Image.fromarray(STEPS.astype(dtype)).save(tmp_path / "data" / "a" / f"{number}.tif")
        assert read(tmp_path / "data")[number][2] < 0


def test_a_tar_is_read_as_its_folder_by_any_process(folder: Path, tmp_path: Path) -> None:
    tar = write_tar(folder, tmp_path / "p.tar")
    assert_same_images(tar, folder)
    images = open_images(tar).images
    images.transform = np.array
    images[0]  # what one process has read must not matter to those that start from it
    helped = DataLoader(images, batch_size=None, num_workers=2, multiprocessing_context="fork")
    expected = [(pixels.tolist(), target) for _, pixels, target in read(tar)]
    assert [(pixels.tolist(), target) for pixels, target in helped] == expected


def test_a_tar_of_tars_has_a_class_each_and_links_have_what_they_link_to(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("bee", "ant"):
        write_tar(folder / name, tmp_path / f"{name}.tar")
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for name in ("bee", "ant"):
            tar.add(tmp_path / f"{name}.tar", f"./{name}.tar")
        os.link(folder / "cat" / "0.png", folder / "cat" / "1b.png")
        tar.add(folder / "cat", "cat")
    assert_same_images(tmp_path / "all.tar", folder)


@pytest.mark.parametrize("above", ["/", "../", "./"])
def test_tars_in_a_tar_keep_their_images_apart(tmp_path: Path, above: str) -> None:
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        for name in ("bee", "ant"):
            path = tar_of(tmp_path, member(f"{above}0.png"), hard_link("1.png", f"{above}0.png"))
            tar.add(path, f"{above}val/{name}.tar")
    data = open_images(tmp_path / "all.tar", split="val")
    assert len(data.images) == 4
    assert data.names == ("ant", "bee")


def file_of(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(place: Path) -> Path:
        (place / name).write_bytes(content)
        return place / name

    return make


def tar_of(place: Path, *members: tarfile.TarInfo) -> Path:
    """Write a tar of headers, whose members hold nothing."""
    with tarfile.open(place / "data.tar", "w") as tar:
        for member in members:
            tar.addfile(member)
    return place / "data.tar"


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def hard_link(name: str, target: str) -> tarfile.TarInfo:
    return member(name, type=tarfile.LNKTYPE, linkname=target)


def test_a_link_that_leads_to_no_earlier_file_is_an_unreadable_image(tmp_path: Path) -> None:
    links = [("own", "own"), ("first", "second"), ("second", "first"), ("lost", "missing")]
    tar = tar_of(tmp_path, *(hard_link(f"a/{n}.png", f"a/{target}.png") for n, target in links))
    expected = [f"a/{name}.png" for name in ("first", "lost", "own", "second")]
    assert [name for name, _, target in read(tar) if target < 0] == expected


def test_a_link_of_a_link_holds_what_the_first_copy_holds(folder: Path, tmp_path: Path) -> None:
    tar = write_tar(folder / "cat", tmp_path / "data.tar")
    with tarfile.open(tar, "a") as opened:
        opened.addfile(hard_link("dog/1.png", "./0.png"))
        opened.addfile(hard_link("dog/2.png", "dog/1.png"))
        opened.addfile(hard_link("0.png", "0.png"))  # the same file, added once more
    images = {name: pixels.tolist() for name, pixels, target in read(tar) if target >= 0}
    assert images["dog/1.png"] == images["dog/2.png"] == images["0.png"] == images["1.png"]


def huge_file(place: Path) -> Path:
    return tar_of(place, member("a/0.png", pax_headers={"size": str(10**30)}))


def bad_sparse_header(place: Path) -> Path:
    headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "x,y"}
    return tar_of(place, member("a/0.png", pax_headers=headers))


def nested_tars(place: Path) -> Path:
    content = b""
    for _ in range(20):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            tar.addfile(member("a.tar", size=len(content)), io.BytesIO(content))
        content = stream.getvalue()
    (place / "data.tar").write_bytes(content)
    return place / "data.tar"


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
        (
            lambda place: write_tar(place, place / "data.tar"),
            r"no images found in .*data.tar \(.png, .jpg",
        ),
        (file_of("data.tar", b""), r"no images found in .*data.tar \(empty file\)"),
        (file_of("data.zip", b"hello"), "data.zip, which is neither a folder nor a .tar"),
        (file_of("data.tar", gzip.compress(b"x")), r"data.tar is compressed; decompress it to a "),
        (huge_file, r"no images found in .*data.tar \(.*; give a folder or tar"),
        (bad_sparse_header, r"no images found in .*data.tar \(.*; give a folder or tar"),
        (nested_tars, r"no images found in .*data.tar \(.*; give a folder or tar"),
        (damaged_tar, r"no images found in .*data.tar \(damaged at byte 2,048\)"),
    ],
)
def test_data_without_images(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with refused(message):
        open_images(make(tmp_path))
