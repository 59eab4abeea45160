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
from retrofit.utils.text import one_line, shortlist


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
    matched: Literal["class map", "labels", "order"] = "order"
    names: tuple[str, ...] | None = None

    def contradicts(self, labels: Sequence[str] | None) -> bool:
        """Whether classes were taken for outputs by their order, and a model's `labels` call these otherwise."""
        return self.matched == "order" and None not in (labels, self.names) and tuple(labels or ()) != self.names


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
        split: Part of the dataset; a folder's sub-folder of that name is used if there is one.
        class_map: File with one class name a line, in the order of the model's outputs (or timm's .pkl of a dict).
        labels: The model's own class names; they stand in for a class map if every class of the data is among them.
        channels: 3 for colour, 1 for grey.

    Raises:
        UsageError: If nothing says where the images are, or two things do.
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
    if dataset == "digits":
        digits = Digits(split == "train", mode)
        return ImageData(digits, len(digits.classes), len(digits.classes), names=digits.classes)
    if data_dir is None and not dataset:
        raise UsageError("there is nothing to read images from; give `data_dir` or `dataset`")
    if not dataset and not Path(str(data_dir)).exists():
        raise RetrofitError(f"there is no data at {data_dir}; give a folder or tar with one folder a class")
    root = None if data_dir is None else str(data_dir)
    mapped = {"class_map": str(class_map)} if dataset and class_map else {}
    try:
        found = create_dataset(dataset, root=root, split=split, input_img_mode=mode, **mapped)
    except Exception as error:  # timm's readers raise AssertionError, RuntimeError, ValueError, ImportError, ...
        raise RetrofitError(
            f"no images found in {data_dir or dataset} ({one_line(error)}); "
            "give a folder or tar with one folder a class"
        ) from error
    if not isinstance(found, ImageDataset):
        listed = getattr(found, "classes", None)  # torchvision's
        known = tuple(str(name) for name in listed) if isinstance(listed, list | tuple) else None
        count = None if known is None else len(known)
        return ImageData(found, count, count, names=known)
    reader = found.reader
    class_to_idx = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None)
    if dataset or class_to_idx is None:
        return ImageData(LabelledImages(reader, None, mode))
    classes = sorted(class_to_idx, key=class_to_idx.__getitem__)
    matched: Literal["class map", "labels", "order"]
    if class_map is not None:
        class_to_idx = _read_class_map(class_map)
        targets, matched = _mapped(classes, class_to_idx, class_map), "class map"
        names = tuple(sorted(class_to_idx, key=class_to_idx.__getitem__))
        return ImageData(LabelledImages(reader, targets, mode), len(classes), max(targets) + 1, matched, names)
    if labels and set(classes) <= set(labels):
        targets, matched = [list(labels).index(name) for name in classes], "labels"
    else:
        targets, matched = list(range(len(classes))), "order"
    return ImageData(LabelledImages(reader, targets, mode), len(classes), max(targets) + 1, matched, tuple(classes))


def _read_class_map(class_map: str | os.PathLike[str]) -> dict[str, int]:
    """Return the model's output for each class name of a class map's file."""
    try:
        return dict(load_class_map(str(class_map)))
    except Exception as error:
        raise RetrofitError(
            f"cannot read the class map {class_map} ({one_line(error)}); give a .txt file with one class name a line"
        ) from error


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
        data_dir: Folder or .tar file of images; their classes do not matter.
        preprocess: The model's.
        images: How many at most.
        batch_size: Images in a batch.

    Returns:
        Batches of shape (N, C, H, W).

    Raises:
        RetrofitError: If there is no image, or one cannot be read.
    """
    data = open_images(data_dir, channels=preprocess.input_size[0])
    return [pixels for pixels, _ in SampledBatches(data, preprocess, images, batch_size)]
