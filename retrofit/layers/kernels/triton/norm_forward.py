"""The forward pass of normality normalization: statistics of each set, the step of lambda, the
size of the noise, and the result. One kernel does all where a program has its sets to itself, one
for each of these where programs share them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.kernels.kernel_options import KernelOptions
from retrofit.layers.kernels.triton import launcher
from retrofit.layers.kernels.triton.norm_result import result_kernel, store_result
from retrofit.layers.kernels.triton.norm_table import (
    BOUNDS,
    CENTRE,
    MEAN,
    NOISE_SCALE,
    STEP,
    load_transform,
)
from retrofit.layers.kernels.triton.psi import first_step, powers_of, psi, step_moments
from retrofit.layers.kernels.triton.sums import (
    is_last_program,
    mean_and_squares,
    merge_moments,
    reduce_parts,
    store_parts,
    sum_parts,
    totals,
)
from retrofit.layers.kernels.triton.tables import load_entries, load_row, load_rows, store_rows
from retrofit.layers.kernels.triton.tiles import (
    add,
    kernel,
    load_standard,
    over,
    place_of,
    zero_sums,
)
from retrofit.layers.kernels.triton_plan import TABLE_ROWS

# Mean and variance


@triton.jit
def _standardization(Table, place, moments, eps):
    """Store mean, variance and 1 / std of each set by its `mean_and_squares`; return them, and the
    standardized extremes.
    """
    mean, squares, low, high = moments
    var = squares / place.count.to(tl.float32)
    rstd = 1 / tl.sqrt(var + eps)
    store_rows(Table, MEAN, place, (mean, var, rstd))
    return mean, var, rstd, -(low + mean) * rstd, (high - mean) * rstd


@kernel
def statistics_kernel(
    X, Table, Parts, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep mean and variance in the table."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    store_parts(Parts, place, mean_and_squares(X, place, TILE))
    if is_last_program(Table, place):
        low, high = reduce_parts(Parts, 2, tl.max, place), reduce_parts(Parts, 3, tl.max, place)
        moments = merge_moments(Parts, place) + (low, high)
        standardization = _standardization(Table, place, moments, eps)
        store_rows(Table, BOUNDS, place, standardization[3:])


# The step of lambda, and the running statistics


@triton.jit
def _add_step_moments(tile, operands, sums, TILE):
    X, mean, rstd = operands
    return add(sums, step_moments(load_standard(X, tile, mean, rstd)))


@triton.jit
def _step_sums(X, place, mean, rstd, TILE):
    sums = over(place, _add_step_moments, (X, mean, rstd), zero_sums(4, TILE), TILE)
    return totals(sums, TILE)


@triton.jit
def _store_step(Table, place, sums, standardization, step_factor, running):
    """Store the step of each set, from sums over it, its gradient, and its factor; move the running
    statistics, by the unbiased variance, and count the batch. Return the step.
    """
    mean, var, rstd, low, high = standardization
    m1, m2, m3, m45 = sums
    Mean, Var, Lambda, Batches, momentum = running
    count = place.count.to(tl.float32)
    v = var * rstd * rstd
    step = first_step(m1 / count, m2 / count, m3 / count, m45 / count, v, low, high)
    store_rows(Table, STEP, place, step + (step_factor,))
    _move(Mean, place, momentum, mean)
    _move(Var, place, momentum, var * (count / tl.maximum(count - 1, 1.0)))
    _move(Lambda, place, momentum, 1 + step[0])
    if Batches is not None:
        tl.store(Batches, tl.load(Batches) + 1, mask=tl.program_id(0) == 0)
    return step[0]


@triton.jit
def _move(Running, place, momentum, value):
    if Running is not None:
        old = load_entries(Running, place, 0.0)
        new = old * (1 - momentum) + value * momentum
        tl.store(Running + place.sets, new.to(Running.dtype.element_ty), mask=place.valid)


@kernel
def step_kernel(
    X, Table, Parts, Code, Mean, Var, Lambda, Batches, step_unit, momentum,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep the step of lambda in the table, and move the running statistics."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    kept = load_rows(Table, MEAN, 3, place)
    store_parts(Parts, place, _step_sums(X, place, kept[0], kept[2], TILE))
    if is_last_program(Table, place):
        step_factor = tl.load(Code).to(tl.float32) * step_unit
        standardization = kept + load_rows(Table, BOUNDS, 2, place)
        running = Mean, Var, Lambda, Batches, momentum
        sums = sum_parts(Parts, 4, place)
        _store_step(Table, place, sums, standardization, step_factor, running)


# The size of the noise: the mean distance of what gets noise from its mean


@triton.jit
def _add_values(tile, operands, sums, TILE):
    """Add up what gets noise, or its distance from a centre."""
    X, mean, rstd, powers, centre = operands
    value = psi(load_standard(X, tile, mean, rstd), powers).y
    if centre is not None:
        value = tl.where(tile.mask, tl.abs(value - centre), 0.0)
    return add(sums, (value,))


@triton.jit
def _sum_of_values(X, place, mean, rstd, powers, centre, TILE):
    sums = over(place, _add_values, (X, mean, rstd, powers, centre), zero_sums(1, TILE), TILE)
    return totals(sums, TILE)


@kernel
def noise_kernel(
    X, Table, Parts, Code, noise_unit, FIELD: tl.constexpr,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep the mean of what gets noise in the table, or the mean distance from it, times the noise's
    factor.
    """
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    mean, rstd, powers, _ = load_transform(Table, place)
    centre, scale = None, 1.0
    if FIELD != CENTRE:
        centre = load_row(Table, CENTRE, place)
        scale = tl.load(Code).to(tl.float32) * noise_unit
    store_parts(Parts, place, _sum_of_values(X, place, mean, rstd, powers, centre, TILE))
    if is_last_program(Table, place):
        total = reduce_parts(Parts, 0, tl.sum, place)
        store_rows(Table, FIELD, place, (total / place.count * scale,))


@kernel
def forward_kernel(
    Out, X, Weight, Bias, Table, Code, Seed, Mean, Var, Lambda, Batches,
    step_unit, noise_unit, eps, momentum,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Do all of a set that a program has to itself."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    code = tl.load(Code).to(tl.float32)
    standardization = _standardization(Table, place, mean_and_squares(X, place, TILE), eps)
    mean, _, rstd, _, _ = standardization
    sums = _step_sums(X, place, mean, rstd, TILE)
    step_factor = code * step_unit
    running = Mean, Var, Lambda, Batches, momentum
    step = _store_step(Table, place, sums, standardization, step_factor, running)
    powers = powers_of(step_factor * step)
    noise_scale = 0.0
    if Seed is not None:
        values = _sum_of_values(X, place, mean, rstd, powers, None, TILE)
        centre = values[0] / place.count
        distances = _sum_of_values(X, place, mean, rstd, powers, centre, TILE)
        noise_scale = distances[0] / place.count * (code * noise_unit)
        store_rows(Table, NOISE_SCALE, place, (noise_scale,))
    store_result(Out, X, Weight, Bias, Seed, place, mean, rstd, powers, noise_scale, TILE)


def forward(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions
) -> Tensor:
    """Fill `out`, and move the running statistics; return a table of `TABLE_ROWS` numbers a set, and a
    number more, by which programs that share sets count themselves.

    Tensors lie in memory in the order of the layout, whatever their shapes.
    """
    plan = launcher.plan_for(x, options.layout)
    *running, momentum = options.running or (None, None, None, None, 0.0)
    code, unit = options.strength
    seed, eps = options.seed, options.eps
    # What the code is multiplied by
    step_unit = unit * options.alpha
    noise_unit = unit * options.xi
    size = (TABLE_ROWS + 1) * plan.sets
    if plan.splits == 1:
        table = launcher.room(x, size)
        tensors = out, x, weight, bias, table, code, seed, *running
        launcher.launch(forward_kernel, plan, *tensors, step_unit, noise_unit, eps, momentum)
        return table
    table = torch.zeros(size, dtype=torch.float32, device=x.device)
    shared = x, table, launcher.room(x, 4, plan.splits, plan.sets)
    launcher.launch(statistics_kernel, plan, *shared, eps)
    launcher.launch(step_kernel, plan, *shared, code, *running, step_unit, momentum)
    if seed is not None:
        launcher.launch(noise_kernel, plan, *shared, code, noise_unit, CENTRE)
        launcher.launch(noise_kernel, plan, *shared, code, noise_unit, NOISE_SCALE)
    launcher.launch(result_kernel, plan, out, x, weight, bias, table, seed)
    return table
