"""Means, extremes and sizes of normalized sets that may be spread over the ranks of a process group."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Dim = tuple[int, ...]


def means(tensors: list[Tensor], dim: Dim, group: ProcessGroup | None) -> list[Tensor]:
    """Mean of each tensor over `dim` (kept as size one) and the ranks of `group`, whose shares may be unequal."""
    if group is None:
        return [tensor.mean(dim, True) for tensor in tensors]
    sums = torch.stack([tensor.sum(dim, True) for tensor in tensors])
    return list(average(sums, _share(tensors[0], dim), group))


def average(sums: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Means over `group` of quantities of which each rank has the sums, stacked, over its `count` values."""
    packed = torch.cat([sums, torch.full_like(sums[:1], count)])
    dist.all_reduce(packed, group=group)
    return packed[:-1] / packed[-1]


def set_size(x: Tensor, dim: Dim, group: ProcessGroup | None) -> Tensor | int:
    """Number of values in each normalized set, over all ranks of `group`."""
    if group is None:
        return _share(x, dim)
    count = torch.tensor(_share(x, dim), dtype=torch.int64, device=x.device)
    dist.all_reduce(count, group=group)
    return count


def extremes(x: Tensor, dim: Dim, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of `x` over `dim` and `group`."""
    if group is None:
        return x.amin(dim, True), x.amax(dim, True)
    shape = [1 if i in dim else size for i, size in enumerate(x.shape)]
    nothing = torch.full(shape, torch.inf, device=x.device, dtype=x.dtype)
    return widest(*((x.amin(dim, True), x.amax(dim, True)) if x.numel() else (nothing, -nothing)), group)


def widest(low: Tensor, high: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Smallest and largest values over `group`, of each rank's own."""
    packed = torch.stack([-low, high])
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    return -packed[0], packed[1]


def _share(x: Tensor, dim: Dim) -> int:
    return math.prod([x.shape[axis] for axis in dim])
