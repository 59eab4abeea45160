"""The pictures of the evidence, CIFAR-10 from tars or scikit-learn's digits: to train on, to choose
by and to test on.

A seed draws its own training pictures, the same number of each class, so that the spread over seeds
holds the choice of pictures too. The validation pictures are the last of each class of the training
tar: no seed trains on them.
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance
from timm.data import create_transform
from timm.models import get_pretrained_cfg, is_model
from torch import Tensor

Normalization = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel, of pixels from 0 to 1."""

HALF = (0.5, 0.5, 0.5)
HALVES: Normalization = (HALF, HALF)
"""What tf_efficientnet_lite0 was trained with."""

Labelled = list[tuple[Image.Image, int]]


@dataclass(frozen=True, eq=False)
class Pictures:
    """What one data set gives.

    Attributes:
        pool: Pictures to draw training pictures from.
        val: Pictures to choose learning rates on.
        test: Pictures that nothing is chosen on.
        flip: Whether a mirrored picture is of the same class.
    """

    pool: Labelled
    val: Labelled
    test: Labelled
    flip: bool

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return 1 + max(label for _, label in self.test)


def cifar(train: str, test: str, val_each: int) -> Pictures:
    """Read two tars with one folder a class; the last `val_each` of each class of `train` are for
    validation.
    """
    every = read_tar(train)
    classes = [
        [one for one in every if one[1] == label]
        for label in range(1 + max(label for _, label in every))
    ]
    pool = [one for pictures in classes for one in pictures[:-val_each]]
    val = [one for pictures in classes for one in pictures[-val_each:]]
    return Pictures(pool, val, read_tar(test), flip=True)


def contrasts(pictures: Pictures) -> Pictures:
    """Return pictures, each with a contrast (0.1 to 1, its logarithm uniform) and a brightness (0.5
    to 1) of its own.

    So do pictures of one scene differ whose light and exposure nobody controls.
    """
    generator = np.random.default_rng(0)

    def dimmed(part: Labelled) -> Labelled:
        factors = [(10 ** -generator.random(), 1 - generator.random() / 2) for _ in part]
        return [
            (
                ImageEnhance.Brightness(ImageEnhance.Contrast(picture).enhance(contrast)).enhance(
                    light
                ),
                label,
            )
            for (picture, label), (contrast, light) in zip(part, factors, strict=True)
        ]

    return Pictures(
        dimmed(pictures.pool), dimmed(pictures.val), dimmed(pictures.test), pictures.flip
    )


def digits() -> Pictures:
    """Return scikit-learn's 1,797 grey digits of 8 x 8: 700 to draw from, 300 for validation, 797
    for testing.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    grey = (data.images / 16 * 255).round().astype(np.uint8)
    order = np.random.default_rng(0).permutation(len(grey))
    every = [
        (Image.fromarray(grey[place]).convert("RGB"), int(data.target[place])) for place in order
    ]
    return Pictures(every[:700], every[700:1000], every[1000:], flip=False)


def read_tar(archive: str) -> Labelled:
    """Decode all pictures of a tar; the classes are its folders in the order of their names."""
    with tarfile.open(archive) as tar:
        members = sorted(
            (one for one in tar.getmembers() if one.isfile()), key=lambda one: one.name
        )
        folders = sorted({PurePosixPath(one.name).parent.name for one in members})
        return [
            (
                Image.open(BytesIO(tar.extractfile(one).read())).convert("RGB"),
                folders.index(PurePosixPath(one.name).parent.name),
            )
            for one in members
        ]


def draw(pool: Labelled, count: int, seed: int) -> Labelled:
    """Draw `count` pictures, as many of each class as of any other."""
    classes = sorted({label for _, label in pool})
    generator = random.Random(seed)
    return [
        one
        for label in classes
        for one in generator.sample([one for one in pool if one[1] == label], count // len(classes))
    ]


def normalization(model: str) -> Normalization:
    """Return what a network of timm was trained with; halves for a network of another name."""
    if not is_model(model):
        return HALVES
    settings = get_pretrained_cfg(model)
    return settings.mean, settings.std


def still(
    pictures: Labelled, size: int, normalize: Normalization = HALVES
) -> tuple[Tensor, Tensor]:
    """Return pictures as they are evaluated, (N, 3, size, size), and their labels."""
    mean, std = normalize
    transform = create_transform(
        (3, size, size), crop_pct=1.0, interpolation="bicubic", mean=mean, std=std
    )
    return _stack(pictures, transform)


class Epochs:
    """Training pictures, augmented and ordered by (seed, epoch) alone: alike for every arm and
    batch size.

    Args:
        pictures: To train on.
        size: Side of the images.
        seed: Of order and augmentation.
        flip: Whether to mirror half of them.
        normalize: What the network was trained with.
    """

    def __init__(
        self,
        pictures: Labelled,
        size: int,
        seed: int,
        flip: bool,
        normalize: Normalization = HALVES,
    ) -> None:
        self.pictures = pictures
        self.seed = seed
        self.normalize = normalize
        mean, std = normalize
        self.transform = create_transform(
            (3, size, size),
            is_training=True,
            scale=(0.6, 1.0),
            hflip=0.5 if flip else 0.0,
            color_jitter=0.0,
            interpolation="bilinear",
            mean=mean,
            std=std,
        )

    def batches(self, epoch: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Give an epoch's batches, the last of which may be smaller."""
        key = 1000 * self.seed + epoch
        random.seed(key)
        np.random.seed(key)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            order = torch.randperm(len(self.pictures)).tolist()
            images, labels = _stack([self.pictures[place] for place in order], self.transform)
        yield from zip(images.split(batch_size), labels.split(batch_size), strict=True)


def _stack(pictures: Sequence[tuple[Image.Image, int]], transform: Any) -> tuple[Tensor, Tensor]:
    images = torch.stack([transform(picture) for picture, _ in pictures])
    return images.contiguous(memory_format=torch.channels_last), torch.tensor(
        [label for _, label in pictures]
    )
