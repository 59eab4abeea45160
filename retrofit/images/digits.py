"""Handwritten digits that need no download: scikit-learn's 1,797 images of 8 x 8 pixels (UCI's optical digits)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

_HELD_OUT = 0.2


class Digits(torch.utils.data.Dataset[tuple[Any, int]]):
    """The digits as pictures, always divided alike: a fifth of each class is held out for validation.

    Args:
        training: The 1,437 images to train on, or else the 360 held out.
        mode: PIL mode, "RGB" or "L".
    """

    classes = tuple("0123456789")
    transform: Callable[[Image.Image], Any]  # timm's create_loader sets it
    target_transform: Callable[[int], int] | None = None  # as torchvision's datasets have it

    def __init__(self, training: bool, mode: str) -> None:
        """Read the images from scikit-learn's own files."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        images, targets = load_digits(return_X_y=True)
        parts = train_test_split(images, targets, test_size=_HELD_OUT, random_state=0, stratify=targets)
        pixels = parts[0 if training else 1].reshape(-1, 8, 8) * (255 / 16)
        self._pixels = pixels.round().astype(np.uint8)
        self._targets = [int(target) for target in parts[2 if training else 3]]
        self._mode = mode

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        target = self._targets[index]
        picture = self.transform(Image.fromarray(self._pixels[index]).convert(self._mode))
        return picture, target if self.target_transform is None else self.target_transform(target)
