"""Standard normal numbers as a function of position and seed, so that they need no storing and no order.

Element i of seed (s0, s1) is a hash of i, mapped through the normal quantile: whoever computes it, on whatever device
and in whatever order, gets the same number (to the rounding of a logarithm). Tails reach 6.3 standard deviations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# |z| = (1 - v) * P(w) / Q(w), with v the two-sided tail probability and w = -log(v * (2 - v)); 1e-7 relative.
NUMERATOR = (
    *(2.928853064076975e-05, 0.0009993967832997441, 0.011874854564666748),
    *(0.08982928842306137, 0.4523918926715851, 1.2533142566680908),
)
DENOMINATOR = (
    *(1.0084270343213575e-06, 0.00016978503845166415, 0.0022797624114900827),
    *(0.032670583575963974, 0.09915989637374878, 1.0),
)
# Multipliers and shifts of an integer finaliser with full avalanche ("triple32" of Wellons' hash-prospector)
MULTIPLIERS = (0xED5AD4BB - 2**32, 0xAC4C1B51 - 2**32, 0x31848BAB)
SHIFTS = (17, 11, 15, 14)


def draw_seed(device: torch.device) -> Tensor:
    """Return two 32-bit words from torch's default generator for `device`."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)


def advance(seed: Tensor, positions: int) -> Tensor:
    """Return the seed whose element 0 is element `positions` of `seed`; positions count modulo 2^32."""
    if positions == 0:
        return seed
    step = (positions + 2**31) % 2**32 - 2**31
    return seed + torch.tensor([step, 0], dtype=torch.int32, device=seed.device)


def normal(shape: Sequence[int], seed: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """Return standard normal float32 numbers of `shape` by a seed of two int32 words. An element's position is its
    indices times `strides`, those of a contiguous tensor if None.
    """
    key = seed[0]
    stride = 1
    for axis in reversed(range(len(shape))):
        step = stride if strides is None else strides[axis]
        steps = torch.arange(shape[axis], dtype=torch.int32, device=seed.device) * step
        key = key + steps.view(-1, *(1,) * (len(shape) - axis - 1))
        stride = stride * shape[axis]
    for place, multiplier in enumerate(MULTIPLIERS):
        key = (_mix(key, SHIFTS[place]) + (seed[1] if place == 1 else 0)) * multiplier
    key = _mix(key, SHIFTS[-1])
    v = (key & 0x7FFFFFFF).to(torch.float32) * 2.0**-31 + 2.0**-32
    w = -torch.log(v * (2 - v))
    z = (1 - v) * _polynomial(w, NUMERATOR) / _polynomial(w, DENOMINATOR)
    return torch.where(key < 0, -z, z)


def _mix(key: Tensor, shift: int) -> Tensor:
    return key ^ ((key >> shift) & ((1 << (32 - shift)) - 1))  # a logical shift


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Evaluate a polynomial, highest power first."""
    out = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        out = out * x + coefficient
    return out
