"""The values that a power transform sees: a sample of each channel, and what may lie beyond it.

A sample of the values is kept, with the largest and the smallest. In use, values go beyond these:
among as many new values as were seen, one is expected to exceed them all. The largest values show
by how much: an exponential tail with their mean excess, as in the method of peaks over threshold.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

# Values of each channel, over all batches
_SAMPLES = 2048
# Largest, and smallest, values of each channel in a batch
_EXTREMES = 32
# Points that stand for the tail beyond the values
_TAIL = 16
# Mean excess of the tail, as a multiple of that of the largest values
_HEAVY = 2.0
# Quantiles of a normal distribution that are used where there are no images
_QUANTILES = 511
# The number of values that these quantiles count as
_IMAGINED = 10_000


@dataclass(frozen=True)
class WeightedSample:
    """Values of each channel, and the share that each value stands for."""

    # (C, S)
    h: Tensor
    # (S,), about 1 together
    weight: Tensor
    # How many of the samples were seen; those behind them are guessed tails.
    seen: int


def with_tails(h: Tensor, weight: Tensor, total: int, few: int) -> WeightedSample:
    """Add what may lie beyond a sample of `total` values: the `few` largest, and smallest, show how
    far it may be.
    """
    few = min(few, h.shape[1])
    above = _beyond(h, few)
    below = -_beyond(-h, few)
    values = torch.cat([h, above, below], 1)
    share = 1 / (total * _TAIL)
    guessed = weight.new_full((2 * _TAIL,), share)
    return WeightedSample(values, torch.cat([weight, guessed]), h.shape[1])


def _beyond(h: Tensor, few: int) -> Tensor:
    """Return values beyond the largest of each channel, of an exponential law whose mean is the
    excess of the `few` largest.
    """
    largest = h.topk(few, 1).values
    mean_excess = largest.mean(1, keepdim=True) - largest[:, -1:]
    steps = torch.arange(_TAIL, dtype=h.dtype, device=h.device)
    ranks = (steps + 0.5) / _TAIL
    excess = -_HEAVY * torch.log1p(-ranks)
    return largest[:, :1] + mean_excess * excess


def gaussian(channels: int, device: torch.device | None = None) -> WeightedSample:
    """Return what running statistics alone say of standardized values: the quantiles of a standard
    normal.
    """
    steps = torch.arange(_QUANTILES, dtype=torch.float64, device=device or "cpu")
    ranks = (steps + 0.5) / _QUANTILES
    h = torch.special.ndtri(ranks).expand(channels, -1)
    weight = torch.full_like(ranks, 1 / _QUANTILES)
    return with_tails(h, weight, _IMAGINED, _EXTREMES)


class Observer:
    """Collects values while a network runs on so many images, in batches of any size."""

    def __init__(self, images: int) -> None:
        self._images = images
        self._generator = torch.Generator().manual_seed(0)
        self._parts: dict[Node, list[tuple[Tensor, Tensor, int]]] = {}

    def take(self, node: Node, values: Tensor) -> None:
        """Keep some of the values, (N, C, *), that a node takes in one batch."""
        share = max(1, _SAMPLES * len(values) // self._images)
        values = values.movedim(1, 0).flatten(1)
        count = values.shape[1]
        positions = torch.randint(
            count,
            (share,),
            generator=self._generator,
            device="cpu",
        )
        chosen = values[:, positions.to(values.device)]
        few = min(_EXTREMES, count)
        largest = values.topk(few, 1).values
        smallest = values.topk(few, 1, largest=False).values
        extremes = torch.cat([largest, smallest], 1)
        self._parts.setdefault(node, []).append((chosen, extremes, count))

    def sample(self, node: Node, channels: int, device: torch.device) -> WeightedSample:
        """Return what a node took, with what may lie beyond; a Gaussian's quantiles where nothing
        was seen.
        """
        if node not in self._parts:
            return gaussian(channels, device)
        samples, extremes, counts = zip(*self._parts[node], strict=True)
        total = sum(counts)
        sampled = torch.cat(samples, 1)
        h = torch.cat([sampled, *extremes], 1).double()
        weight = torch.full_like(h[0], 1 / total)
        weight[: sampled.shape[1]] = 1 / sampled.shape[1]
        return with_tails(h, weight, total, extremes[0].shape[1] // 2)
