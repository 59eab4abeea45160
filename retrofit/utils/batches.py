"""Batches of images as people have them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.errors import RetrofitError, UsageError
from retrofit.utils.hooks import hooked


def input_of(batch: Any) -> Any:
    """Return what a network takes of a batch as a loader gives it: its first entry, or all of it."""
    return batch[0] if isinstance(batch, list | tuple) and batch else batch


def images_of(batches: Iterable[Any], name: str = "calibrate") -> Iterator[Tensor]:
    """Yield the images of each batch: a tensor (N, C, H, W), or the first entry of a list or tuple, as loaders give it.

    A single tensor is one batch. `name` is the argument, for messages. A UsageError says that something else is given,
    a RetrofitError that a batch holds NaN or infinity, of which a fit would be wrong without a word.
    """
    takes = f"`{name}` takes batches of images, tensors (N, C, H, W)"
    if not isinstance(batches, Iterable):
        raise UsageError(f"{takes}; got {type(batches).__name__}")
    for number, batch in enumerate([batches] if isinstance(batches, Tensor) else batches, 1):
        images = input_of(batch)
        if not isinstance(images, Tensor) or images.ndim < 2:
            what = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise UsageError(f"{takes}; batch {number} is {what}")
        if not images.isfinite().all():
            raise RetrofitError(f"batch {number} of `{name}` holds NaN or infinity; mend how its images are prepared")
        yield images


def without_image_rows(run: Callable[[Tensor], Any], layers: Collection[nn.Module], image: Tensor) -> set[nn.Module]:
    """Return the layers whose outputs do not have twice as many rows for two images as for one, (1, C, H, W).

    Such are layers of transformers that take (tokens, images, channels), and a norm of parameters alone. A layer that
    is not called is not among them. `run` is the network, in evaluation.
    """
    rows: list[dict[nn.Module, int]] = []

    def count(layer: nn.Module, _args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.ndim:
            rows[-1].setdefault(layer, len(out))

    with hooked(layer.register_forward_hook(count) for layer in layers):
        for images in (image, torch.cat([image, image])):
            rows.append({})
            run(images)
    return {layer for layer, one in rows[0].items() if rows[1].get(layer) != 2 * one}
