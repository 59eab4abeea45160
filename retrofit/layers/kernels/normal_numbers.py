"""Standard normal numbers as a function of position and seed, so that noise needs no storing and no
order.

Number i of seed (s0, s1) is a hash of i, mapped through the normal quantile: whoever computes it, on
whatever device and in whatever order, gets the same (to the rounding of a logarithm). Tails reach
6.3 standard deviations. Which element of a tensor has number i is the caller's choice: kernels count
in the order of memory, formulas that a compiler traces in that of the dimensions.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# |z| = (1 - v) * P(w) / Q(w), with v the two-sided tail probability and w = -log(v * (2 -
# v)); 1e-7 relative
NUMERATOR = (
    *(2.928853064076975e-05, 0.0009993967832997441, 0.011874854564666748),
    *(0.08982928842306137, 0.4523918926715851, 1.2533142566680908),
)
DENOMINATOR = (
    *(1.0084270343213575e-06, 0.00016978503845166415, 0.0022797624114900827),
    *(0.032670583575963974, 0.09915989637374878, 1.0),
)


def normal(
    shape: Sequence[int], seed: Tensor, strides: Sequence[int] | None = None, first: int = 0
) -> Tensor:
    """Return standard normal float32 numbers of `shape` by a seed of two int32 words. An element's
    position (modulo 2^32) is `first` plus its indices times `strides`, those of a contiguous tensor
    if None.
    """
    if strides is None:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    key = seed[0] + ((first + 2**31) % 2**32 - 2**31)
    for axis, stride in enumerate(strides):
        steps = torch.arange(shape[axis], dtype=torch.int32, device=seed.device) * stride
        behind = (1,) * (len(shape) - axis - 1)
        key = key + steps.view(-1, *behind)
    key = _hash(key, seed)
    # Of 31 bits, in the middle of their interval
    v = (key & 0x7FFFFFFF).to(torch.float32) * 2.0**-31 + 2.0**-32
    w = -torch.log(v * (2 - v))
    z = (1 - v) * _polynomial(NUMERATOR, w) / _polynomial(DENOMINATOR, w)
    return torch.where(key < 0, -z, z)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """Evaluate a polynomial, highest power first."""
    value = torch.zeros_like(x)
    for coefficient in coefficients:
        value = value * x + coefficient
    return value


def _hash(key: Tensor, seed: Tensor) -> Tensor:
    """Return random bits for each position: an integer finaliser with full avalanche, "triple32" of
    Wellons' hash-prospector.
    """
    key = _mix(key, 17) * (0xED5AD4BB - 2**32)
    key = (_mix(key, 11) + seed[1]) * (0xAC4C1B51 - 2**32)
    return _mix(_mix(key, 15) * 0x31848BAB, 14)


def _mix(key: Tensor, shift: int) -> Tensor:
    # a logical shift
    return key ^ ((key >> shift) & ((1 << (32 - shift)) - 1))
