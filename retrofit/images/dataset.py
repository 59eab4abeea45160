"""Labelled images for evaluation, read by timm's readers: a folder or tar with one folder a class, or a named dataset.

timm's own dataset puts the next image in place of one that it cannot read and drops images of classes that the class
map lacks, with a log line at most. A measured accuracy would then be that of other images than the user thinks, so here
an unreadable image is marked, and a missing class is an error.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_transform
from timm.data.readers.class_map import load_class_map
from torch import Tensor

from retrofit.errors import RetrofitError, UsageError
from retrofit.images.digits import Digits
from retrofit.networks.library import Preprocess
from retrofit.utils.text import one_line, shortlist, shown

Matched = Literal["class map", "labels", "order"]

_TRAIN_NAMES = ("train", "training")  # of one part, to timm
TO_VALIDATE = ("val", "valid", "validation", "eval", "evaluation")
_PARTS = (*_TRAIN_NAMES, *TO_VALIDATE, "test", "testing")
_FOLDERS = ("", "torch/folder", "torch/image_folder")  # datasets whose parts are sub-folders
# torchvision checks the names of these itself; of all others it gives the test images for any word but "train".
_OWN_PARTS = ("torch/imagenet", "torch/inat", "torch/inaturalist", "torch/places365")


class LabelledImages(torch.utils.data.Dataset[tuple[Any, int]]):
    """The images of a timm reader.

    An image that cannot be read or decoded comes as a blank one, which keeps its batch whole, with the target
    -1 - index; `unreadable` turns such a target back into a file name.

    Args:
        reader: timm's reader: (file, class index) by number, and file names.
        targets: The model's output for each class index of the reader; None where they are the same.
        mode: PIL mode, "RGB" or "L".
    """

    transform: Callable[[Image.Image], Any]  # timm's create_loader sets it

    def __init__(self, reader: Any, targets: Sequence[int] | None, mode: str) -> None:
        """Take the reader as it is."""
        self._reader = reader
        self._targets = targets
        self._mode = mode
        self._process: int | None = None

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        self._keep_files_apart()
        try:
            file, target = self._reader[index][:2]
            with file, Image.open(file) as image:
                pixels = image.convert(self._mode)
        except Exception:  # Pillow's decoders raise almost anything on a damaged file
            return self.transform(Image.new(self._mode, (256, 256))), -1 - index
        return self.transform(pixels), int(target if self._targets is None else self._targets[target])

    def _keep_files_apart(self) -> None:
        """Close what another process opened: timm keeps a tar open, and after a fork all would share one place in it.

        They would move each other's place, and read the bytes of other images.
        """
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        tars = getattr(self._reader, "tar_state", {})
        for tar in tars.values() if isinstance(tars, dict) else (tars,):
            for state in (tar, *tar.children.values()):
                if state.tf is not None:
                    state.tf.close()  # this process's own handle: the place is not moved
                state.reset()

    def unreadable(self, target: int) -> str:
        """Return the name of the file behind a negative target."""
        return str(self._reader.filename(-1 - target))


@dataclass(frozen=True)
class ImageData:
    """Labelled images and what is known about their classes.

    Attributes:
        images: A dataset for timm's `create_loader`, still without a transform.
        classes: How many classes the data has; None if unknown.
        outputs: How many outputs a model needs for the targets; None if unknown.
        matched: How classes found their outputs: by class map, by the model's own labels, or by their order.
        names: The data's class names in the order of their targets, or with a class map the map's; None if unknown.
    """

    images: Any
    classes: int | None = None
    outputs: int | None = None
    matched: Matched = "order"
    names: tuple[str, ...] | None = None

    def contradicts(self, labels: Sequence[str] | None) -> bool:
        """Whether classes were taken for outputs by their order, and a model's `labels` call these otherwise."""
        return self.matched == "order" and None not in (labels, self.names) and tuple(labels or ()) != self.names


def has_part(data_dir: str | os.PathLike[str] | None, dataset: str, split: str) -> bool:
    """Whether the data has a part of that name, "." being all of a folder or tar.

    Folders have it as a sub-folder, tars have none. The digits, and torchvision's datasets, have parts of the usual
    names; what else there is checks the name when it is opened.
    """
    dataset = dataset.lower()
    if dataset in _FOLDERS and data_dir is not None:
        names = next((names for names in (_TRAIN_NAMES, TO_VALIDATE) if split in names), (split,))
        return split == "." or any((Path(data_dir) / name).is_dir() for name in names)
    if dataset == "digits" or dataset.startswith("torch/"):
        return dataset in _OWN_PARTS or split in _PARTS
    return True


def parts_in(data_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return the sub-folders of a folder that hold folders and are called as parts of data usually are."""
    found = [] if data_dir is None else _folders(Path(data_dir))
    return sorted(name for name in found if name.lower() in _PARTS and _folders(Path(str(data_dir)) / name))


def _folders(folder: Path) -> list[str]:
    return next(os.walk(folder), ("", [], []))[1]


def open_images(
    data_dir: str | os.PathLike[str] | None,
    *,
    dataset: str = "",
    split: str = "validation",
    class_map: str | os.PathLike[str] | None = None,
    labels: Sequence[str] | None = None,
    channels: int = 3,
) -> ImageData:
    """Open labelled images.

    Args:
        data_dir: Folder or .tar file; None for data that lies in none.
        dataset: timm's dataset name ("torch/cifar10", "hfds/...", ...), or "digits", built in; empty for a folder or
            tar.
        split: Part of the dataset; of a folder, a sub-folder of that name, or "." for all of it. A folder without parts
            needs no split.
        class_map: File with one class name a line, in the order of the model's outputs (or timm's .pkl of a dict).
        labels: The model's own class names; they stand in for a class map if every class of the data is among them.
        channels: 3 for colour, 1 for grey.

    Raises:
        UsageError: If nothing says where the images are, or two things do; if the data has no such part, or it does not
            tell its class names to a class map.
        RetrofitError: If there is no such data, no image, or a class that the class map lacks.
    """
    if channels not in (1, 3):
        raise RetrofitError(
            f"the model takes {channels} channels, images give 1 or 3; build it with `in_chans=3` or `in_chans=1`"
        )
    mode = "RGB" if channels == 3 else "L"
    if dataset == "digits" and data_dir is not None:
        raise UsageError(
            f"the digits are built in and lie in no folder; drop `dataset='digits'` or `data_dir={str(data_dir)!r}`"
        )
    if data_dir is None and not dataset:
        raise UsageError("there is nothing to read images from; give `data_dir` or `dataset`")
    if not dataset and not Path(str(data_dir)).exists():
        raise RetrofitError(f"there is no data at {data_dir}; give a folder or tar with one folder a class")
    _check_part(data_dir, dataset, split)
    class_to_idx = None if class_map is None else _read_class_map(class_map)
    if dataset == "digits":
        found: Any = Digits(split in _TRAIN_NAMES, mode)
    else:
        found = _create(data_dir, dataset, split, mode, class_to_idx)
    reader = found.reader if isinstance(found, ImageDataset) else None
    classes = _classes_of(found, dataset)
    if classes is None:
        if class_map is not None and dataset.lower().startswith("torch/"):
            raise UsageError(f"{dataset} does not tell what its classes are called; drop `class_map`")
        return ImageData(found if reader is None else LabelledImages(reader, None, mode))
    matched: Matched = "order"
    targets, names = list(range(len(classes))), tuple(classes)
    if class_map is not None and class_to_idx is not None:
        targets, matched = _mapped(classes, class_to_idx, class_map), "class map"
        names = tuple(sorted(class_to_idx, key=class_to_idx.__getitem__))
    elif labels and set(classes) <= set(labels):
        targets, matched = [list(labels).index(name) for name in classes], "labels"
    if reader is not None:
        found = LabelledImages(reader, targets, mode)
    elif matched != "order":
        found.target_transform = targets.__getitem__
    return ImageData(found, len(classes), max(targets) + 1, matched, names)


def _check_part(data_dir: str | os.PathLike[str] | None, dataset: str, split: str) -> None:
    """Refuse a part that the data does not have: timm would read all of a folder, torchvision its test images."""
    if has_part(data_dir, dataset, split):
        return
    if dataset.lower() not in _FOLDERS:
        raise UsageError(f"{dataset} has no part {shown(split)}; give `split='train'` or `split='validation'`")
    if split == "validation":  # the default: a folder without parts is read as it is
        if parts := parts_in(data_dir):
            raise UsageError(
                f"{data_dir} has no part to validate on, but {shortlist(parts)}; give `split` one of these names, or "
                "`split='.'` for all of it"
            )
    elif Path(str(data_dir)).is_dir() or split not in _PARTS:  # a tar is one part, whatever it is called
        raise UsageError(f"the data has no part {shown(split)}; give `split` the name of a sub-folder, or leave it out")


def _create(
    data_dir: str | os.PathLike[str] | None, dataset: str, split: str, mode: str, class_to_idx: dict[str, int] | None
) -> Any:
    """Return timm's dataset; a named one that does not tell its classes is given the class map."""
    root = None if data_dir is None else str(data_dir)
    mapped = {"class_map": class_to_idx} if dataset and class_to_idx else {}
    try:
        return create_dataset(dataset, root=root, split=split, input_img_mode=mode, **mapped)
    except Exception as error:  # timm's readers raise AssertionError, RuntimeError, ValueError, ImportError, ...
        raise RetrofitError(
            f"no images found in {data_dir or dataset} ({one_line(error)}); "
            "give a folder or tar with one folder a class"
        ) from error


def _classes_of(found: Any, dataset: str) -> list[str] | None:
    """Return the names of a dataset's classes in their order, if it tells them."""
    if not isinstance(found, ImageDataset):
        listed = getattr(found, "classes", None)  # torchvision's
        return [str(name) for name in listed] if isinstance(listed, list | tuple) else None
    reader = found.reader
    class_to_idx = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
    return None if dataset or class_to_idx is None else sorted(class_to_idx, key=class_to_idx.__getitem__)


def _read_class_map(class_map: str | os.PathLike[str]) -> dict[str, int]:
    """Return the model's output for each class name of a class map's file: 0 to n - 1, each once."""
    path = Path(class_map)
    try:
        if path.suffix.lower() == ".txt":  # of a name that comes twice, timm's reader keeps the last
            lines = path.read_text(encoding="utf-8").rstrip().split("\n")
            pairs = [(line.strip(), number) for number, line in enumerate(lines)]
        else:
            pairs = list(load_class_map(str(path)).items())
    except Exception as error:
        raise RetrofitError(
            f"cannot read the class map {class_map} ({one_line(error)}); give a .txt file with one class name a line"
        ) from error
    found: dict[str, int] = {}
    taken: set[int] = set()
    for name, index in pairs or [("", 0)]:
        wrong = ""
        if name == "":
            wrong = f"has no name for output {shown(index)}"
        elif name in found:
            wrong = f"has {shown(name)} for outputs {found[name]} and {index}"
        elif type(index) is not int or not 0 <= index < len(pairs) or index in taken:
            wrong = (
                f"has output {shown(index)} for {shown(name)}, which is not one of its own from 0 to {len(pairs) - 1}"
            )
        if wrong:
            raise RetrofitError(
                f"the class map {class_map} {wrong}; give each output one name, and each name one output"
            )
        found[name] = index
        taken.add(index)
    return found


def _mapped(classes: Sequence[str], class_to_idx: dict[str, int], class_map: str | os.PathLike[str]) -> list[int]:
    """Return the model's output for each class of the data."""
    lacking = [name for name in classes if name not in class_to_idx]
    if lacking:
        raise RetrofitError(
            f"{len(lacking)} of the data's {len(classes)} classes are not in {class_map} "
            f"({shortlist(lacking)}); use the class map that names the data's folders"
        )
    return [class_to_idx[name] for name in classes]


class SampledBatches(Sequence[tuple[Tensor, Tensor]]):
    """Some images of a set, spread evenly over it, as batches that are read when they are asked for.

    Each is (pixels, targets): (N, C, H, W), as a model takes them, and (N,).

    Args:
        data: What `open_images` found; its transform is set.
        preprocess: The model's.
        images: How many at most.
        batch_size: Images in a batch.
    """

    def __init__(self, data: ImageData, preprocess: Preprocess, images: int, batch_size: int = 32) -> None:
        """Read nothing yet."""
        self._images = data.images
        self._images.transform = create_transform(**preprocess.to_dict())
        self._batch_size = batch_size
        self._count = min(images, len(data.images))

    def __len__(self) -> int:
        return math.ceil(self._count / self._batch_size)

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Tensor, Tensor]]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Read one batch, or several.

        Raises:
            RetrofitError: If an image cannot be read.
        """
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        found = [self._read(i) for i in range(self._count)[index * self._batch_size :][: self._batch_size]]
        return torch.stack([pixels for pixels, _ in found]), torch.tensor([target for _, target in found], device="cpu")

    def _read(self, number: int) -> tuple[Tensor, int]:
        pixels, target = self._images[number * len(self._images) // self._count]
        if target < 0:
            raise RetrofitError(f"cannot read {self._images.unreadable(target)}; remove it")
        return pixels, target


def sample_batches(
    data_dir: str | os.PathLike[str], preprocess: Preprocess, images: int = 128, batch_size: int = 32
) -> list[Tensor]:
    """Read some images, spread evenly over a folder or tar, as a model takes them.

    Args:
        data_dir: Folder or .tar file of images; their classes do not matter. Of a folder, a part to validate on is
            taken if there is one.
        preprocess: The model's.
        images: How many at most.
        batch_size: Images in a batch.

    Returns:
        Batches of shape (N, C, H, W).

    Raises:
        RetrofitError: If there is no image, or one cannot be read.
    """
    split = "validation" if has_part(data_dir, "", "validation") else "."
    data = open_images(data_dir, split=split, channels=preprocess.input_size[0])
    return [pixels for pixels, _ in SampledBatches(data, preprocess, images, batch_size)]
