"""Where a network lies, and in which precision it runs."""

from __future__ import annotations

import torch
from torch import nn

from retrofit.utils.placement import autocast, device_of, placement_of


def test_of_the_first_tensor() -> None:
    assert device_of(nn.ReLU()) == torch.device("cpu")
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm2d(2, affine=False, device="meta")) == torch.device("meta")  # buffers alone
    assert placement_of(nn.Linear(2, 2).bfloat16()) == (torch.device("cpu"), torch.bfloat16)
    assert placement_of(nn.ReLU()) == (torch.device("cpu"), torch.float32)


def test_mixed_precision_only_where_a_dtype_is_given() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    for dtype, made in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        with autocast(torch.device("cpu"), dtype):
            assert layer(x).dtype == made
