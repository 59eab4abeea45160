"""What a layer sees, which approximations are fitted on: values, the share that each stands for, and what may follow.

A sample of everything, and the largest and smallest values beside it. What a layer sees in use goes beyond: of values
to come, one in as many as were seen is expected to exceed them all. By how much is taken from the largest: an
exponential tail with the mean excess of those, as of peaks over a threshold.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SAMPLES = 2048  # of each channel, over all batches
_EXTREMES = 32  # largest, and smallest, of each channel in a batch
_TAIL = 16  # points in place of what lies beyond
_HEAVY = 2.0  # what new images go beyond the largest values by, over the mean excess of those
_GAUSSIAN = 511  # quantiles where there are no images,
_IMAGINED = 10_000  # in place of so many values


@dataclass(frozen=True)
class WeightedSample:
    """Values of each channel.

    Attributes:
        h: (C, S), those seen first.
        weight: (S,), the share that each stands for; their sum is about 1.
        seen: How many were seen; the others are guessed.
    """

    h: Tensor
    weight: Tensor
    seen: int

    def affine(self, scale: Tensor, shift: Tensor) -> WeightedSample:
        """Return scale * h + shift, (C,) each."""
        return WeightedSample(self.h * scale[:, None] + shift[:, None], self.weight, self.seen)


def with_tails(h: Tensor, weight: Tensor, total: int, few: int) -> WeightedSample:
    """Add what may lie beyond values.

    Args:
        h: Values, (C, S).
        weight: The share that each stands for, (S,).
        total: How many values there were.
        few: How many of the largest, and of the smallest, show how far it may be.
    """
    few = min(few, h.shape[1])
    ranks = (torch.arange(_TAIL, dtype=h.dtype, device=h.device) + 0.5) / _TAIL
    excess = -_HEAVY * torch.log1p(-ranks)
    tails = []
    for sign in (1.0, -1.0):
        largest = (sign * h).topk(few, 1).values
        last = largest[:, :1]
        tails.append(sign * (last + (largest.mean(1, keepdim=True) - largest[:, -1:]) * excess))
    guessed = torch.full((2 * _TAIL,), 1 / (total * _TAIL), dtype=weight.dtype, device=weight.device)
    return WeightedSample(torch.cat([h, *tails], 1), torch.cat([weight, guessed]), h.shape[1])


class Observer:
    """Collects values while a network runs.

    Args:
        images: How many are to come, in batches of any size.
    """

    def __init__(self, images: int) -> None:
        """Begin with none."""
        self._images = images
        self._generator = torch.Generator().manual_seed(0)
        self._found: dict[Hashable, list[tuple[Tensor, Tensor, int]]] = {}

    def take(self, key: Hashable, values: Tensor) -> None:
        """Keep some of the values, (N, C, *), that a batch brings about at one place."""
        share = max(1, _SAMPLES * len(values) // self._images)
        values = values.movedim(1, 0).flatten(1)
        count = values.shape[1]
        chosen = torch.randint(count, (share,), generator=self._generator, device="cpu").to(values.device)
        few = min(_EXTREMES, count)
        extremes = [values.topk(few, 1, largest).values for largest in (True, False)]
        self._found.setdefault(key, []).append((values[:, chosen], torch.cat(extremes, 1), count))

    def samples(self) -> dict[Hashable, WeightedSample]:
        """Return what was seen at each place, with what may lie beyond."""
        return {key: self._merged(parts) for key, parts in self._found.items()}

    def _merged(self, parts: Sequence[tuple[Tensor, Tensor, int]]) -> WeightedSample:
        samples, extremes, counts = zip(*parts, strict=True)
        total, few = sum(counts), extremes[0].shape[1] // 2
        h = torch.cat([*samples, *extremes], 1).double()
        weight = torch.full((h.shape[1],), 1 / total, dtype=h.dtype, device=h.device)
        count = sum(sample.shape[1] for sample in samples)
        weight[:count] = 1 / count
        return with_tails(h, weight, total, few)


def gaussian(channels: int, device: torch.device | None = None) -> WeightedSample:
    """Return what running statistics alone say of standardised values: the quantiles of a standard normal."""
    ranks = (torch.arange(_GAUSSIAN, dtype=torch.float64, device=device or "cpu") + 0.5) / _GAUSSIAN
    h = torch.special.ndtri(ranks).expand(channels, -1)
    return with_tails(h, torch.full_like(ranks, 1 / _GAUSSIAN), _IMAGINED, _EXTREMES)
