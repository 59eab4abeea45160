"""Opening labelled images: what is found, what is refused, and which images a sample takes."""

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrofit.errors import RetrofitError, UsageError
from retrofit.evaluation import predictions
from retrofit.images import dataset as module
from retrofit.images.dataset import open_images, sample_batches
from retrofit.record import Preprocess
from tests.networks.conftest import refused
from tests.pictures import Colours, write_folder, write_tar

PLAIN = Preprocess((3, 16, 16), (0.0,) * 3, (1.0,) * 3, "nearest", 1.0)


@pytest.mark.parametrize(
    ("place", "options", "message"),
    [
        ("nowhere", {}, "there is no data at"),
        ("pictures", {"channels": 4}, "model takes 4; build"),
        ("pictures", {"class_map": "absent.txt"}, "cannot read the class map"),
        ("pictures", {"class_map": "map.csv"}, "cannot read the class map"),
        (None, {"dataset": "digits", "class_map": "map.txt"}, r"9 .* 10 classes are .* \(1, 2, 3 and 6 more"),
    ],
)
def test_what_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str | None, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("map.csv").write_text("ant,0\n")
    Path("map.txt").write_text("0\nant\n")
    with pytest.raises(RetrofitError, match=message):
        open_images(place, **options)


def test_samples_spread_over_the_classes(folder: Path) -> None:
    batches = sample_batches(folder, PLAIN, images=6, batch_size=4)
    assert [tuple(batch.shape) for batch in batches] == [(4, 3, 16, 16), (2, 3, 16, 16)]
    assert predictions(Colours(), batches) == [0, 0, 0, 1, 2, 2]  # the first two bees look like ants
    assert sum(map(len, sample_batches(folder, PLAIN))) == 12
    assert sum(map(len, sample_batches(folder.parent, PLAIN))) == 12  # parts and classes do not matter


def test_an_unreadable_sample_is_an_error(folder: Path) -> None:
    (folder / "ant" / "0.png").write_bytes(b"")
    with pytest.raises(RetrofitError, match=r"cannot read ant/0.png"):
        sample_batches(folder, PLAIN)


@pytest.mark.parametrize("labels", [None, ["cat", "bee", "ant"], ["ant", "bat", "bee"], ["ant", "bee"]], ids=str)
def test_labels_that_classes_taken_by_order_contradict(labels: list[str] | None, folder: Path) -> None:
    assert open_images(folder, labels=labels).contradicts(labels) is bool(labels and "cat" not in labels)


@pytest.mark.parametrize(
    ("parts", "split", "outcome"),
    [
        (("train", "test"), "test", 3),
        (("train", "test"), "training", 3),
        (("train", "test"), ".", 6),
        (("train", "test"), "validation", r"no part to validate on, but test, train; give `split` .* `split='\.'`"),
        (("Train", "Val"), "validation", "no part to validate on, but Train, Val;"),
        (("train", "val"), "trian", "the data has no part 'trian'; give `split`"),
        (("",), "train", "the data has no part 'train'"),
        (".tar", "train", 3),  # it is one part
        (".tar", ".", 3),
        (".tar", "tset", "has no part 'tset'; give `split"),
        ("digits", "training", 1437),
        ("digits", "val", 360),
        ("digits", ".", "has no part '.'; give `split"),
        ("torch/cifar10", "tset", "has no part 'tset'; give `split"),
        ("torch/QMNIST", ".", "has no part '.'; give `split"),
    ],
    ids=str,
)
def test_parts(tmp_path: Path, parts: str | tuple[str, ...], split: str, outcome: int | str) -> None:
    """All of the data in a part's place would hold what was trained on, or be the images held out."""
    for part in parts if isinstance(parts, tuple) else [""]:
        write_folder(tmp_path / "data" / part, each=1)
    dataset = "" if parts == ".tar" or isinstance(parts, tuple) else parts
    place = write_tar(tmp_path / "data", tmp_path / "p.tar") if parts == ".tar" else tmp_path / "data"
    with nullcontext() if isinstance(outcome, int) else pytest.raises(UsageError, match=outcome):
        data = open_images(None if dataset == "digits" else place, dataset=dataset, split=split)
        assert len(data.images) == outcome


def test_a_class_may_be_called_like_a_part(folder: Path) -> None:
    (folder / "bee").rename(folder / "train")
    assert open_images(folder).names == ("ant", "cat", "train")


@pytest.mark.parametrize(("dataset", "way"), [("digits", "class map"), ("torch/image_folder", "labels")])
def test_classes_of_named_data_find_their_outputs(folder: Path, tmp_path: Path, dataset: str, way: str) -> None:
    place = None if dataset == "digits" else folder
    plain = open_images(place, dataset=dataset)
    assert plain.names is not None
    outputs = ["other", *reversed(plain.names)]
    (tmp_path / "map.txt").write_text("\n".join(outputs))
    given: dict[str, Any] = {"class_map": tmp_path / "map.txt"} if way == "class map" else {"labels": outputs}
    data = open_images(place, dataset=dataset, **given)
    assert (data.matched, data.classes, data.outputs) == (way, len(plain.names), len(outputs))
    plain.images.transform = data.images.transform = np.asarray
    for number in range(0, len(plain.images), 5):
        assert outputs[data.images[number][1]] == plain.names[plain.images[number][1]]


def class_map(folder: Path, content: str | dict[str, Any]) -> Path:
    path = folder / ("map.txt" if isinstance(content, str) else "map.pkl")
    path.write_bytes(content.encode() if isinstance(content, str) else pickle.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("cat\n\nbee\nant\n", "output 1 for ''"),
        ("\ncat\nbee\nant", "output 0 for ''"),
        ("cat\nbee\nbee \nant\n", "output 2 for 'bee'; give each output, from 0 to 3, one name of its own"),
        ({"cat": 0, "bee": 1, "ant": 1}, "output 1 for 'ant'"),
        ({"cat": 0, "bee": 1, "ant": 3}, "output 3 for 'ant'"),
        ({"cat": 0, "bee": 1, "ant": "2"}, "output '2' for 'ant'"),
        ({}, "output 0 for ''"),
    ],
    ids=str,
)
def test_class_maps_that_would_shift_the_outputs(folder: Path, tmp_path: Path, content: Any, message: str) -> None:
    with refused(rf"the class map .*/map.\w+ is not one to one, with {message}"):
        open_images(folder, class_map=class_map(tmp_path, content))


def test_a_class_map_for_classes_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "create_dataset", lambda *_, **__: [])
    with pytest.raises(UsageError, match="torch/inat does not tell what its classes are called; drop `class_map`"):
        open_images(tmp_path, dataset="torch/inat", class_map=class_map(tmp_path, "ant\n"))


@pytest.mark.parametrize("content", ["cat\nbee\nant\n\n \n", "cat\r\nbee\r\nant", {"ant": 2, "cat": 0, "bee": 1}])
def test_class_maps(folder: Path, tmp_path: Path, content: str | dict[str, Any]) -> None:
    data = open_images(folder, class_map=class_map(tmp_path, content))
    assert (data.names, data.outputs) == (("cat", "bee", "ant"), 3)
