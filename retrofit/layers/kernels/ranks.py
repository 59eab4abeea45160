"""What the ranks that share normalized sets tell each other between the stages of a C++ kernel.

A stage leaves parts, a row a quantity and a column a set: means over the rank's own values. Here they become means over
all ranks, in the order and the dtype in which `formulas` reduces them: ranks with and without C++ kernels may mix, also
where a rank has no values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers import distributed

ROWS = 11
"""Of the parts of `forward`."""
LAST = 4
"""The stage of `forward` that writes."""
BACKWARD = slice(0, 5)
"""Rows that stage 0 of `backward` leaves: the gradient of lambda and the four projections. Stage 1 writes."""
MEAN_AND_VARIANCE = slice(0, 2)
"""Rows that stage 0 of `forward` leaves."""
MOMENTS = slice(2, 9)
"""Rows that stage 1 of `forward` leaves: five means of the Newton step, the smallest and the largest value."""


def forward_stages(noise: bool) -> list[tuple[int, slice]]:
    """Return the stages of `forward` before the last, and the rows that each leaves."""
    step = [(0, MEAN_AND_VARIANCE), (1, MOMENTS)]
    return [*step, (2, slice(9, 10)), (3, slice(10, 11))] if noise else step  # mean of y, its mean absolute deviation


def share_forward(stage: int, own: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return what a stage of `forward` left, over all ranks.

    Args:
        stage: The stage.
        own: What it left on this rank, (rows, sets) in float32.
        count: Values a set on this rank.
        group: The ranks.
    """
    if stage == 0:
        (mean,) = average(own[:1], count, group)
        apart = own[0] - mean
        offset, power = average(torch.stack([apart, own[1] + apart * apart]), count, group)
        return torch.stack([mean + offset.nan_to_num(0.0), (power - offset * offset).clamp_min(0)])
    if stage == 1:
        extremes = distributed.widest(own[5], own[6], group)
        return torch.stack([*average(own[:5], count, group), *extremes])
    return average(own, count, group)


def average(own: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return means over all ranks of (rows, sets) means over this rank's `count` values a set."""
    return distributed.average(own * count, count, group)
