"""The backward pass of normality normalization: the sums that its gradients take, then the gradient
of x. One kernel does both where a program has its sets to itself.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.kernels.kernel_options import KernelOptions
from retrofit.layers.kernels.triton import launcher
from retrofit.layers.kernels.triton.affine import (
    affine_of_elements,
    affine_of_sets,
    store_affine_sums,
    store_affine_sums_of_runs,
)
from retrofit.layers.kernels.triton.arithmetic import normal
from retrofit.layers.kernels.triton.norm_table import (
    PROJECTION,
    RSTD,
    SLOPES,
    STEP_FACTOR,
    load_transform,
    over_with_powers,
)
from retrofit.layers.kernels.triton.psi import pulls
from retrofit.layers.kernels.triton.sums import is_last_program, store_parts, sum_parts, totals
from retrofit.layers.kernels.triton.tables import load_row, load_rows, store_rows
from retrofit.layers.kernels.triton.tiles import (
    add,
    kernel,
    load,
    load_standard,
    over,
    place_of,
    store,
    zero_sums,
)

# The most of a thread, so that two programs of 8 warps fit a processor: where the compiler unrolls
# loops, it would take more
REGISTERS = 128


# Sums


@triton.jit
def _add_pulls(tile, operands, sums, TILE):
    """Add up what `eager.pulled_back` takes means of, and the gradients of gamma and beta."""
    _, _, X, Grad, Weight, Seed, gamma, mean, rstd, slopes, noise_scale, powers = operands
    grad = load(Grad, tile)
    h = load_standard(X, tile, mean, rstd)
    g = grad * affine_of_elements(Weight, gamma, tile, TILE)
    y, slope, by_lmbda, step_slope = pulls(h, g, powers, slopes)
    step_slope = tl.where(tile.mask, step_slope, 0.0)
    if Seed is not None:
        y += normal(tile.start + tile.offset, Seed) * noise_scale
    return add(sums, (by_lmbda, slope, slope * h, step_slope, step_slope * h, grad * y, grad))


@triton.jit
def _store_behind_runs(place, first_run, operands, sums, TILE):
    """Store the gradients of gammas that change along the runs, and begin their sums anew."""
    if TILE.along == "runs":
        rest = store_affine_sums_of_runs(operands[0], operands[1], place, first_run, sums[5:], TILE)
        sums = sums[:5] + rest
    return sums


@triton.jit
def _gradient_sums(X, Grad, Weight, Table, AffineSums, Seed, place, partials, TILE):
    """Return a program's sums of what `eager.pulled_back` takes means of, and store those for gamma
    and beta.
    """
    mean, rstd, powers, noise_scale = load_transform(Table, place)
    slopes, gamma = load_rows(Table, SLOPES, 4, place), affine_of_sets(Weight, place, 1.0, TILE)
    operands = AffineSums, partials, X, Grad, Weight, Seed, gamma, mean, rstd, slopes, noise_scale
    sums = zero_sums(7, TILE)
    sums = over_with_powers(place, _add_pulls, operands, powers, sums, TILE, _store_behind_runs)
    if TILE.along != "runs":
        store_affine_sums(AffineSums, partials, place, sums[5:], TILE)
    return totals(sums[:5], TILE)


@triton.jit
def _projection(sums, Table, place, eps):
    """Return the factors of N * d step / d h, of 1 and of h in the gradient of x, times 1 / std.

    The step depends on v = var / (var + eps) too, N * d v / d h = 2 * h; what of it the projections
    leave is 2 * h * (1 - v).
    """
    to_lmbda, direct, direct_h, of_step, of_step_h = sums
    count = place.count.to(tl.float32)
    rstd, by_v = load_row(Table, RSTD, place), load_row(Table, SLOPES + 4, place)
    pull = load_row(Table, STEP_FACTOR, place) * to_lmbda / count
    tilt = (direct_h + pull * of_step_h) / count - 2 * pull * by_v * (eps * rstd * rstd)
    return rstd * pull, rstd * (direct + pull * of_step) / count, rstd * tilt


@kernel
def gradient_sums_kernel(
    X, Grad, Weight, Table, Parts, AffineSums, partials, Seed, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Keep the sums that the gradient of x takes in the table. `AffineSums` receives sums of
    grad * y and of grad, `partials` each.
    """
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    sums = _gradient_sums(X, Grad, Weight, Table, AffineSums, Seed, place, partials, TILE)
    store_parts(Parts, place, sums)
    if is_last_program(Table, place):
        projection = _projection(sum_parts(Parts, 5, place), Table, place, eps)
        store_rows(Table, PROJECTION, place, projection)


# The gradient of x


@triton.jit
def _store_gradient_tile(tile, operands, sums, TILE):
    GradX, X, Grad, Weight, gamma, mean, rstd, slopes, powers, pull, offset, tilt = operands
    h = load_standard(X, tile, mean, rstd)
    g = load(Grad, tile) * affine_of_elements(Weight, gamma, tile, TILE)
    _, slope, _, step_slope = pulls(h, g, powers, slopes)
    store(GradX, tile, slope * rstd + pull * step_slope - offset - h * tilt)
    return sums


@triton.jit
def _store_gradient(GradX, X, Grad, Weight, Table, place, projection, TILE):
    mean, rstd, powers, _ = load_transform(Table, place)
    slopes, gamma = load_rows(Table, SLOPES, 4, place), affine_of_sets(Weight, place, 1.0, TILE)
    operands = GradX, X, Grad, Weight, gamma, mean, rstd, slopes, powers
    over(place, _store_gradient_tile, operands + projection, (), TILE)


@kernel
def gradient_kernel(
    GradX, X, Grad, Weight, Table,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store the gradient of x by what `gradient_sums_kernel` kept."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    projection = load_rows(Table, PROJECTION, 3, place)
    _store_gradient(GradX, X, Grad, Weight, Table, place, projection, TILE)


@kernel
def backward_kernel(
    GradX, X, Grad, Weight, Table, AffineSums, partials, Seed, eps,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Do all of a set that a program has to itself."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    sums = _gradient_sums(X, Grad, Weight, Table, AffineSums, Seed, place, partials, TILE)
    projection = _projection(sums, Table, place, eps)
    _store_gradient(GradX, X, Grad, Weight, Table, place, projection, TILE)


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    table: Tensor,
    options: KernelOptions,
) -> Tensor:
    """See `eager.backward`; `table` is `forward`'s, and tensors lie in memory as there."""
    plan = launcher.plan_for(x, options.layout)
    affine_sums = launcher.room(x, 2, *plan.gradients)
    tensors = x, grad, weight, table
    rest = affine_sums, affine_sums.numel() // 2, options.seed, options.eps
    if plan.splits == 1:
        launcher.launch(backward_kernel, plan, grad_x, *tensors, *rest, registers=REGISTERS)
    else:
        parts = launcher.room(x, 5, plan.splits, plan.sets)
        launcher.launch(gradient_sums_kernel, plan, *tensors, parts, *rest, registers=REGISTERS)
        launcher.launch(gradient_kernel, plan, grad_x, *tensors, registers=REGISTERS)
    return affine_sums.sum((1, 2)).view(2, *options.layout.affine)
