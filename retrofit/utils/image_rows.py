"""Which layers hold the images of a batch in their first dimension: what pairs images goes by that."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.utils.hooks import hooked


def without_image_rows(run: Callable[[Tensor], Any], layers: Collection[nn.Module], image: Tensor) -> set[nn.Module]:
    """Return the layers whose outputs have not twice as many rows for two images as for one.

    So it is in transformers that take (tokens, images, channels), and with a norm of parameters alone. What is not
    called is not among them.

    Args:
        run: The network, in evaluation.
        layers: Some of its layers.
        image: One image, (1, C, H, W).
    """

    def rows_of(images: Tensor) -> dict[nn.Module, int]:
        rows: dict[nn.Module, int] = {}

        def look(layer: nn.Module, _args: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.ndim:
                rows.setdefault(layer, len(out))

        with hooked(layer.register_forward_hook(look) for layer in layers):
            run(images)
        return rows

    one, two = rows_of(image), rows_of(torch.cat([image, image]))
    return {layer for layer, rows in one.items() if two.get(layer) != 2 * rows}
