"""The table that the forward pass of normality normalization leaves for the backward pass: its
rows, and the transform that they describe.
"""

from __future__ import annotations

import triton
import triton.language as tl

from retrofit.layers.kernels.triton.psi import powers_of
from retrofit.layers.kernels.triton.tables import load_rows
from retrofit.layers.kernels.triton.tiles import over

# The first four as in `eager.FIELDS`
MEAN, VAR, RSTD, STEP = map(tl.constexpr, range(4))
# Five rows from here: derivatives of the step, by four moments and by v
SLOPES = tl.constexpr(4)
# t * alpha, the factor of the step; t * xi * spread, the scale of the noise
STEP_FACTOR, NOISE_SCALE = map(tl.constexpr, (9, 10))
# Of a stage for a later one: the two extremes, and the mean of what gets noise
BOUNDS, CENTRE = map(tl.constexpr, (11, 13))
# Three rows in the place of these, of the backward pass: factors in the gradient of x
PROJECTION = tl.constexpr(11)


@triton.jit
def load_transform(Table, place):
    """Return mean, 1 / std, the powers, and the scale of the noise."""
    mean, _, rstd, step = load_rows(Table, MEAN, 4, place)
    step_factor, noise_scale = load_rows(Table, STEP_FACTOR, 2, place)
    return mean, rstd, powers_of(step_factor * step), noise_scale


@triton.jit
def over_with_powers(place, FORMULA, operands, powers, sums, TILE, AFTER=None):
    """Go through a program's elements with powers, where no p is near 0 without its series."""
    if TILE.single or tl.max(powers[5]) > 0:
        sums = over(place, FORMULA, operands + (powers,), sums, TILE, AFTER)
    else:
        sums = over(place, FORMULA, operands + (powers[:4],), sums, TILE, AFTER)
    return sums
