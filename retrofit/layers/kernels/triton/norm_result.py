"""The result of normality normalization: psi of what is standardized, its noise, gamma and beta."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.kernels.layout import Layout
from retrofit.layers.kernels.triton import launcher
from retrofit.layers.kernels.triton.affine import affine_of_elements, affine_of_sets
from retrofit.layers.kernels.triton.arithmetic import normal
from retrofit.layers.kernels.triton.norm_table import load_transform, over_with_powers
from retrofit.layers.kernels.triton.psi import powers_of, psi
from retrofit.layers.kernels.triton.tables import load_rows
from retrofit.layers.kernels.triton.tiles import kernel, load_standard, over, place_of, store


@triton.jit
def _store_result(tile, operands, sums, TILE):
    Out, X, Weight, Bias, Seed, gamma, beta, mean, rstd, noise_scale, powers = operands
    y = psi(load_standard(X, tile, mean, rstd), powers).y
    if Seed is not None:
        y += normal(tile.start + tile.offset, Seed) * noise_scale
    gamma = affine_of_elements(Weight, gamma, tile, TILE)
    beta = affine_of_elements(Bias, beta, tile, TILE)
    store(Out, tile, y * gamma + beta)
    return sums


@triton.jit
def store_result(Out, X, Weight, Bias, Seed, place, mean, rstd, powers, noise_scale, TILE):
    """Store psi, its noise, gamma and beta."""
    gamma = affine_of_sets(Weight, place, 1.0, TILE)
    beta = affine_of_sets(Bias, place, 0.0, TILE)
    operands = Out, X, Weight, Bias, Seed, gamma, beta, mean, rstd, noise_scale
    # A branch has to return something
    over_with_powers(place, _store_result, operands, powers, (place.runs,), TILE)


@kernel
def result_kernel(
    Out, X, Weight, Bias, Table, Seed,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the result by what the table has of its sets."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    mean, rstd, powers, noise_scale = load_transform(Table, place)
    store_result(Out, X, Weight, Bias, Seed, place, mean, rstd, powers, noise_scale, TILE)


@kernel
def apply_kernel(
    Out, X, Constants,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the result by constants: mean, 1 / std, lambda - 1, gamma and beta of each set."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    mean, rstd, change, gamma, beta = load_rows(Constants, 0, 5, place)
    operands = Out, X, None, None, None, gamma, beta, mean, rstd, 0.0, powers_of(change)
    over(place, _store_result, operands, (), TILE)


def apply(out: Tensor, x: Tensor, layout: Layout, constants: Tensor) -> None:
    """See `eager.apply`."""
    plan = launcher.plan_for(x, layout)
    launcher.launch(apply_kernel, plan, out, x, constants)
