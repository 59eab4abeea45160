"""Means, extremes and sizes of normalized sets that may be spread over the ranks of a process group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Reductions:
    """Reduce over `dims`, kept as size one, and the ranks of `group`, whose shares of a set may be unequal."""

    dims: tuple[int, ...]
    group: ProcessGroup | None = None

    def means(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the mean of each tensor."""
        if self.group is None:
            return [tensor.mean(self.dims, True) for tensor in tensors]
        sums = torch.stack([tensor.sum(self.dims, True) for tensor in tensors])
        return list(average(sums, self._share(tensors[0]), self.group))

    def extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest values."""
        if self.group is None:
            return x.amin(self.dims, True), x.amax(self.dims, True)
        shape = [1 if i in self.dims else size for i, size in enumerate(x.shape)]
        nothing = torch.full(shape, torch.inf, device=x.device, dtype=x.dtype)
        own = (x.amin(self.dims, True), x.amax(self.dims, True)) if x.numel() else (nothing, -nothing)
        return widest(*own, self.group)

    def size(self, x: Tensor) -> Tensor | int:
        """Return the number of values in each normalized set."""
        if self.group is None:
            return self._share(x)
        count = torch.tensor(self._share(x), dtype=torch.int64, device=x.device)
        dist.all_reduce(count, group=self.group)
        return count

    def _share(self, x: Tensor) -> int:
        return math.prod([x.shape[axis] for axis in self.dims])


def average(sums: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Means over `group` of quantities of which each rank has the sums, stacked, over its `count` values."""
    packed = torch.cat([sums, torch.full_like(sums[:1], count)])
    dist.all_reduce(packed, group=group)
    return packed[:-1] / packed[-1]


def widest(low: Tensor, high: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Smallest and largest values over `group`, of each rank's own."""
    packed = torch.stack([-low, high])
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    return -packed[0], packed[1]
