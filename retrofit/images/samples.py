"""Some images of a dataset, spread evenly over it: to calibrate, to diagnose, to measure."""

from collections.abc import Sequence
from typing import Any

import torch
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from retrofit.errors import RetrofitError
from retrofit.images.class_maps import FileName
from retrofit.images.dataset import ImageData, has_split, open_images
from retrofit.record import Preprocess


def sample_loader(
    data: ImageData,
    preprocess: Preprocess,
    images: int,
    batch_size: int = 32,
    labelled: bool = True,
) -> DataLoader[Any]:
    """Return a loader of images spread evenly over a dataset; a batch is read when it is asked for.

    Args:
        data: The dataset; its transform is set to that of `preprocess`.
        preprocess: How a model takes its images.
        images: The most images to read.
        batch_size: Images in a batch.
        labelled: Whether batches hold targets.

    Returns:
        A loader of batches (pixels, targets): (N, C, H, W), as a model takes them, and (N,), or
        None unless `labelled`. An image that cannot be read is a RetrofitError.
    """

    def batch(samples: Sequence[tuple[Tensor, int]]) -> tuple[Tensor, Tensor | None]:
        """Stack images and targets, or raise RetrofitError for an unreadable image."""
        pixels, targets = zip(*samples, strict=True)
        lowest = min(targets)
        if lowest < 0:
            raise RetrofitError(f"cannot read {data.images.unreadable(lowest)}; remove it")
        labels = torch.tensor(targets, device="cpu") if labelled else None
        return torch.stack(pixels), labels

    data.images.transform = create_transform(**preprocess.to_dict())
    rows = evenly_spread(len(data.images), images)
    # A loader draws a number even without workers: not from the user's generator.
    generator = torch.Generator(torch.get_default_device())
    return DataLoader(Subset(data.images, rows), batch_size, collate_fn=batch, generator=generator)


def evenly_spread(total: int, most: int) -> list[int]:
    """Return the numbers of at most `most` of `total` images, spread evenly."""
    count = min(most, total)
    return [position * total // count for position in range(count)]


def sample_batches(
    data_dir: FileName, preprocess: Preprocess, images: int = 128, batch_size: int = 32
) -> list[Tensor]:
    """Read images spread evenly over a folder or tar, as batches (N, C, H, W) that a model takes.

    The validation split is read if there is one; classes do not matter.

    Args:
        data_dir: The folder or tar.
        preprocess: How a model takes its images.
        images: The most images to read.
        batch_size: Images in a batch.

    Raises:
        RetrofitError: If there is no image, or one cannot be read.
    """
    split = "."
    if has_split(data_dir, "", "validation"):
        split = "validation"
    data = open_images(data_dir, split=split, channels=preprocess.input_size[0])
    return [pixels for pixels, _ in sample_loader(data, preprocess, images, batch_size)]
