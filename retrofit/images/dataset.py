"""Labelled images: a folder or tar with a folder per class, scikit-learn's digits, or one of timm's
named datasets.

timm's own dataset puts the next image in place of one that it cannot read and drops images of
classes that the class map lacks, with a log line at most. A measured accuracy would then be that of
other images than the user thinks, so here an unreadable image is marked, and a missing class is an
error.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from timm.data import ImageDataset, create_dataset

from retrofit.errors import RetrofitError, UsageError
from retrofit.images import NAMED_BY_TIMM
from retrofit.images.class_maps import FileName, read_class_map
from retrofit.images.image_files import ADVICE, ImageFiles, folders_of_folders, is_split
from retrofit.utils.text import one_line, plural, shortlist, shown

Matched = Literal["class map", "labels", "order"]

# Names of one split, to timm.
_TRAIN_NAMES = ("train", "training")
TO_VALIDATE = ("val", "valid", "validation", "eval", "evaluation")
_SPLITS = (*_TRAIN_NAMES, *TO_VALIDATE, "test", "testing")
# torchvision checks the names of these itself; of all others it gives the test images for any word
# but "train".
_CHECKED_SPLITS = ("torch/imagenet", "torch/inat", "torch/inaturalist", "torch/places365")


# How many of a folder's images are looked at for their range.
_LOOKED_AT = 4
# 16-bit images without a brighter pixel use less than a quarter of their range.
_DARK = 2**14


class LabelledImages(torch.utils.data.Dataset[tuple[Any, int]]):
    """The images of a reader, ours or timm's (file or image, and class, by number), in PIL mode
    "RGB" or "L".

    An image that cannot be read or decoded comes as a blank one, which keeps its batch whole, with
    the target -1 - index; `unreadable` turns such a target back into a file name.
    """

    # timm's create_loader sets this attribute.
    transform: Callable[[Image.Image], Any]
    # As torchvision's datasets have it.
    target_transform: Callable[[int], int] = int

    def __init__(self, reader: Any, mode: str) -> None:
        self._reader = reader
        self._mode = mode

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        try:
            image, target = self._decoded(index)
        # Pillow's decoders raise almost anything on a damaged file.
        except Exception:
            blank = Image.new(self._mode, (256, 256))
            return self.transform(blank), -1 - index
        return self.transform(image), int(self.target_transform(target))

    def _decoded(self, index: int) -> tuple[Image.Image, int]:
        file, target = self._reader[index][:2]
        with file, _decoding(file) as image:
            return _in_8_bits(image).convert(self._mode), target

    def unreadable(self, target: int) -> str:
        """Return the name of the file behind a negative target."""
        return str(self._reader.filename(-1 - target))


@contextmanager
def _decoding(file: Any) -> Iterator[Image.Image]:
    """Yield the image in a file, or the one that is given."""
    with warnings.catch_warnings():
        # An image beyond Pillow's limit is an error, and listed; one beyond half of it is not.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with file if isinstance(file, Image.Image) else Image.open(file) as image:
            yield image


class _Numbered:
    """torchvision's images as a reader, which have numbers in place of file names."""

    def __init__(self, images: Any) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        return self._images[index]

    def filename(self, index: int) -> str:
        return f"image {index}"


def _has_16_bits(image: Image.Image) -> bool:
    of_unsaid_depth = image.mode == "I" and image.format in ("PNG", "PPM")
    return image.mode.startswith("I;16") or of_unsaid_depth


def _lost_levels(files: ImageFiles) -> tuple[str, ...]:
    """Say so if 16-bit images use so little of their range, as those of a 12-bit camera do, that 8
    bits keep few of their levels; some of them are looked at.
    """
    brightest = 0
    for index in range(0, len(files), math.ceil(len(files) / _LOOKED_AT)):
        # One that cannot be read is listed when it is needed.
        with suppress(Exception), _decoding(files[index][0]) as image:
            if not _has_16_bits(image):
                return ()
            brightest = max(brightest, int(np.asarray(image).max()))
    if not 0 < brightest < _DARK:
        return ()
    return (
        f"16-bit images that were looked at have no pixel above {brightest} of 65535, so that "
        f"{brightest // 257 + 1} of 256 levels are used; scale their pixels to the whole range",
    )


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16 bits a pixel to 8, which Pillow would cut off at 255.

    Raises:
        ValueError: If the range of the pixels is unknown.
    """
    if _has_16_bits(image):
        pixels = np.asarray(image).astype(np.uint32)
        return Image.fromarray(((pixels + 128) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range")
    return image


def _digits(training: bool) -> list[tuple[Image.Image, int]]:
    """Return scikit-learn's 1,797 digits of 8 x 8 pixels (UCI's optical digits), which need no
    download.

    A fifth of each class, always the same 360 images, is held out for validation.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, targets = load_digits(return_X_y=True)
    numbers = np.arange(len(targets))
    train, val = train_test_split(numbers, test_size=0.2, random_state=0, stratify=targets)
    rows = train if training else val
    pixels = (images.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
    return [(Image.fromarray(pixels[row]), int(targets[row])) for row in rows]


@dataclass(frozen=True)
class ImageData:
    """Labelled images, and what is known about their classes; None is unknown."""

    # A dataset for timm's `create_loader`, still without a transform.
    images: Any
    # How many classes the data has.
    classes: int | None = None
    # How many outputs a model needs for the targets.
    outputs: int | None = None
    # What gave the classes their outputs: a class map, the model's own labels, their order.
    matched: Matched = "order"
    # Names of the outputs: of the data's classes, the class map's, or the model's labels.
    names: tuple[str, ...] | None = None
    # Sentences for the user.
    notes: tuple[str, ...] = ()
    # A hash of the names of all image files, of which `images` may be a part; None without files.
    fingerprint: str | None = None
    # Images that lie in no class's folder, where others do.
    classless: tuple[str, ...] = ()

    def contradicts(self, labels: Sequence[str] | None) -> bool:
        """Whether classes were matched to outputs by order alone, and a model's `labels` are other
        names.
        """
        if self.matched != "order" or labels is None or self.names is None:
            return False
        return tuple(labels) != self.names

    def doubt(self, outputs: int | None, labels: Sequence[str] | None) -> str:
        """Say why the data's classes, in their order, may not be a model's outputs; empty if they
        may.
        """
        if self.matched != "order" or self.classes is None:
            return ""
        if self.classes != outputs:
            classes = plural(self.classes, "class")
            count = outputs or 0
            model_outputs = plural(count, "output")
            problem = f"the data has {classes} and the model {model_outputs}"
        elif self.contradicts(labels):
            ours = shortlist(self.names or ())
            theirs = shortlist(labels or ())
            problem = f"the data's classes ({ours}) are not what the model calls its outputs"
            problem += f" ({theirs})"
        else:
            return ""
        last = self.classes - 1
        return f"{problem}: the classes, sorted by name, were taken for outputs 0 to {last}"

    def mapped(
        self, class_map: FileName | None = None, labels: Sequence[str] | None = None
    ) -> "ImageData":
        """Return the data with targets by a class map, or by labels if these hold every class.

        Args:
            class_map: As for `open_images`.
            labels: As for `open_images`.

        Raises:
            RetrofitError: If the class map cannot be read or lacks classes of the data.
        """
        classes = self.names
        if classes is None:
            return self
        matched: Matched = "labels"
        if class_map is not None:
            matched = "class map"
            labels = list(read_class_map(class_map))
        if labels is None:
            return self
        # Of outputs with the same name, the first.
        outputs = {name: output for output, name in reversed([*enumerate(labels)])}
        lacking = [name for name in classes if name not in outputs]
        if lacking and class_map is None:
            return self
        if lacking:
            ours = plural(len(classes), "class")
            raise RetrofitError(
                f"{len(lacking)} of the data's {ours} are not in {class_map} "
                f"({shortlist(lacking)}); use the class map that names the data's "
                "folders"
            )
        targets = [outputs[name] for name in classes]
        self.images.target_transform = targets.__getitem__
        return replace(self, outputs=max(targets) + 1, matched=matched, names=tuple(labels))


def _split_folder(data_dir: FileName, split: str) -> str | None:
    """Return the name of a split's folder in a folder or tar, "." for all of it; None if there is
    none.
    """
    if split == ".":
        return split
    root = Path(data_dir)
    synonyms = next((names for names in (_TRAIN_NAMES, TO_VALIDATE) if split in names), ())
    return next((name for name in (split, *synonyms) if is_split(root, name, _SPLITS)), None)


def has_split(data_dir: FileName | None, dataset: str, split: str) -> bool:
    """Whether the data has a split of that name; "." is all of a folder or tar.

    The splits of a folder or tar are folders in it. The digits and torchvision's datasets have
    splits of the usual names. Other datasets check the name when they are opened.
    """
    if not dataset and data_dir is not None:
        return _split_folder(data_dir, split) is not None
    dataset = dataset.lower()
    if dataset == "digits" or dataset.startswith("torch/"):
        return dataset in _CHECKED_SPLITS or split in _SPLITS
    return True


def split_of(
    data_dir: FileName | None,
    dataset: str,
    split: str,
    default: str | None,
    advice: str,
) -> str:
    """Return a split of the data: the one that is asked for, or "." for the default of a folder or
    tar without splits.

    Args:
        data_dir: As for `open_images`.
        dataset: As for `open_images`.
        split: The split that is asked for.
        default: The name that is asked for where the user gives none; None for no such name.
        advice: What to do where there is none of that name.

    Raises:
        UsageError: If the data has no such split.
    """
    if has_split(data_dir, dataset, split):
        return split
    others: list[str] = []
    if not dataset and data_dir is not None:
        others = folders_of_folders(Path(data_dir), _SPLITS)
    if split == default and not others:
        return "."
    problem = f"the data has no split {shown(split)}"
    if others:
        problem += f", but {shortlist(others)}"
    raise UsageError(f"{problem}; {advice}")


def open_images(
    data_dir: FileName | None,
    *,
    dataset: str = "",
    split: str = "validation",
    class_map: FileName | None = None,
    labels: Sequence[str] | None = None,
    channels: int = 3,
) -> ImageData:
    """Open labelled images.

    Args:
        data_dir: A folder or .tar, or the folder of a named dataset.
        dataset: A dataset that timm names ("torch/cifar10", ...), or "digits".
        split: Name of a split: a folder in the folder or tar, or "." for all of it. A folder or tar
            without splits needs none.
        class_map: A file with one class name a line, in the order of the model's outputs.
        labels: The model's own class names, which stand in for a class map if every class of the
            data is among them.
        channels: Channels of the images, 3 or 1.

    Raises:
        UsageError: If the arguments contradict each other, or the data has no such split.
        RetrofitError: If there is no image, or the data or the class map cannot be read.
    """
    if channels not in (1, 3):
        advice = "build it with `in_chans=3` or `in_chans=1`"
        raise RetrofitError(f"images give 3 channels or 1, the model takes {channels}; {advice}")
    _check_origin(data_dir, dataset)
    advice = "give `split` the name of one, or `split='.'` for all of the data"
    if dataset:
        advice = "give `split` train or validation"
    split = split_of(data_dir, dataset, split, "validation", advice)
    mode = "L"
    if channels == 3:
        mode = "RGB"
    if dataset == "digits":
        is_training = split in _TRAIN_NAMES
        digits = _digits(is_training)
        images = LabelledImages(digits, mode)
        data = _of_classes(images, "0123456789")
    elif not dataset and data_dir is not None:
        data = _of_files(data_dir, split, mode)
    else:
        data = _named(data_dir, dataset, split, mode, class_map)
    return data.mapped(class_map, labels)


def _check_origin(data_dir: FileName | None, dataset: str) -> None:
    if dataset == "digits" and data_dir is not None:
        raise UsageError(
            "the digits are built in and lie in no folder; drop `dataset` or `data_dir`"
        )
    name = dataset.lower()
    if name in ("torch/folder", "torch/image_folder"):
        raise UsageError(f"{dataset} is a folder of images; give `data_dir` alone")
    if name.startswith("torch/") and data_dir is None:
        raise UsageError(f"{dataset} is read from a folder; name it with `data_dir`")
    if dataset == "digits" or name.startswith(NAMED_BY_TIMM):
        return
    if dataset:
        raise UsageError(
            f"unknown dataset {shown(dataset)}; give a name of timm (torch/cifar10, hfds/...), "
            "digits, or `data_dir` alone"
        )
    if data_dir is None:
        raise UsageError("there is nothing to read images from; give `data_dir` or `dataset`")
    if not Path(data_dir).exists():
        raise RetrofitError(f"there is no data at {data_dir}; {ADVICE}")


def _of_files(data_dir: FileName, split: str, mode: str) -> ImageData:
    files = ImageFiles(Path(data_dir), _split_folder(data_dir, split) or ".")
    notes: tuple[str, ...] = ()
    if files.empty:
        notes += (f"no image in {shortlist(files.empty)}: no class of its own",)
    if files.hidden:
        left_out = plural(len(files.hidden), "image")
        notes += (f"{left_out} in hidden folders left out ({shortlist(files.hidden)})",)
    notes += _lost_levels(files)
    data = _of_classes(LabelledImages(files, mode), files.classes, notes)
    return replace(data, fingerprint=files.fingerprint(), classless=files.classless())


def _of_classes(images: Any, classes: Sequence[str], notes: tuple[str, ...] = ()) -> ImageData:
    return ImageData(images, len(classes), len(classes), names=tuple(classes), notes=notes)


def _named(
    data_dir: FileName | None, dataset: str, split: str, mode: str, class_map: FileName | None
) -> ImageData:
    """Open one of timm's named datasets; one that does not tell its classes gets the class map."""
    root = None
    if data_dir is not None:
        root = str(data_dir)
    outputs = None
    if class_map is not None:
        outputs = read_class_map(class_map)
    try:
        images = create_dataset(
            dataset, root=root, split=split, input_img_mode=mode, class_map=outputs
        )
    # timm's readers raise AssertionError, RuntimeError, ValueError, ImportError, ...
    except Exception as error:
        raise RetrofitError(
            f"no images found in {data_dir or dataset} ({one_line(error)}); {ADVICE}"
        ) from error
    if isinstance(images, ImageDataset):
        return ImageData(LabelledImages(images.reader, mode))
    # torchvision's datasets name their classes, in order.
    classes = getattr(images, "classes", None)
    if dataset.lower().startswith("torch/"):
        images = LabelledImages(_Numbered(images), mode)
    if isinstance(classes, list | tuple):
        return _of_classes(images, [str(name) for name in classes])
    if class_map is not None and dataset.lower().startswith("torch/"):
        raise UsageError(f"{dataset} does not tell what its classes are called; drop `class_map`")
    return ImageData(images)
