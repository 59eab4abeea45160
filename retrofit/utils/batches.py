"""Batches of images as people have them, looked at before anything is fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from retrofit.errors import RetrofitError, UsageError


def input_of(batch: Any) -> Any:
    """Return what a network takes of a batch as a loader gives it: its first entry, or all of it."""
    return batch[0] if isinstance(batch, list | tuple) and batch else batch


def images_of(batches: Iterable[Any], name: str = "calibrate") -> Iterator[Tensor]:
    """Yield the images of each batch.

    Args:
        batches: Tensors (N, C, H, W), or lists and tuples whose first entry is one, as a loader gives them; or one
            tensor.
        name: The argument, for messages.

    Raises:
        UsageError: If something else is given.
        RetrofitError: If a batch holds NaN or infinity, to which a fit would be as wrong, and silently so.
    """
    wanted = f"`{name}` takes batches of images, tensors (N, C, H, W)"
    if not isinstance(batches, Iterable):
        raise UsageError(f"{wanted}; got {type(batches).__name__}")
    for number, batch in enumerate([batches] if isinstance(batches, Tensor) else batches, 1):
        images = input_of(batch)
        if not isinstance(images, Tensor):
            raise UsageError(f"{wanted}; batch {number} is {type(images).__name__}")
        if images.ndim < 2:
            raise UsageError(f"{wanted}; batch {number} is {tuple(images.shape)}")
        if not images.isfinite().all():
            raise RetrofitError(f"batch {number} of `{name}` holds NaN or infinity; mend how its images are prepared")
        yield images
