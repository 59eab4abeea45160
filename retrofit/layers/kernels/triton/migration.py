"""Migrated group normalization: the moments of each sample and channel, merged into a map by a
scale and a shift, and its derivative.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from retrofit.layers.function_transforms import differentiable_once, needed
from retrofit.layers.kernels.channelwise import Activation
from retrofit.layers.kernels.kernel_options import Strength
from retrofit.layers.kernels.layout import laid_out_as
from retrofit.layers.kernels.triton import launcher
from retrofit.layers.kernels.triton.activations import IDENTITY
from retrofit.layers.kernels.triton.affine import affine_of_sets
from retrofit.layers.kernels.triton.maps import (
    channel_plan,
    launch_map,
    load_argument,
    phi_of,
    store_gradient,
)
from retrofit.layers.kernels.triton.sums import (
    Shared,
    mean_and_squares,
    merge_moments,
    store_parts,
    sum_parts,
    totals,
)
from retrofit.layers.kernels.triton.tables import Entries, load_entries, load_rows, store_rows
from retrofit.layers.kernels.triton.tiles import add, kernel, load, over, place_of, zero_sums
from retrofit.layers.kernels.triton_plan import LaunchPlan

# An inner map behind which gradients are pulled back: its table, the scale behind it, the activation
_Inner = tuple[Tensor, Tensor, Activation]


# Over elements


@kernel
def moments_kernel(
    Parts, X,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store mean and sum of squared deviations of a program's share of each set."""
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    mean, squares, _, _ = mean_and_squares(X, place, TILE)
    store_parts(Parts, place, (mean, squares))


@triton.jit
def _add_products(tile, operands, sums, TILE):
    X, Grad, mean, argument, activation = operands
    x, grad = load(X, tile), load(Grad, tile)
    y, slope = phi_of(x, argument, activation)
    g = grad * slope
    return add(sums, (g, g * (x - mean), grad * y, grad))


@kernel
def products_kernel(
    Parts, X, Grad, Mean, Inner, Scale, lower, upper, KIND: tl.constexpr,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store sums of grad and of grad * (x - mean) over a program's share of each set. With an inner
    map, that grad is pulled back as in `combine_kernel`; then follow sums of grad * phi and of
    grad.
    """
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    mean, scale = affine_of_sets(Mean, place, 0.0, TILE), affine_of_sets(Scale, place, 1.0, TILE)
    argument = load_argument(None, None, Inner, place, 0.0)
    operands = X, Grad, mean, argument, (KIND, lower, upper)
    sums = zero_sums(2 if Inner is None else 4, TILE)
    sums = totals(over(place, _add_products, operands, sums, TILE), TILE)
    store_parts(Parts, place, (sums[0] * scale, sums[1] * scale) + sums[2:])


@kernel
def combine_kernel(
    GradX, X, Grad, Table, Inner, Scale, lower, upper, KIND: tl.constexpr,
    outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets,
    TILE: tl.constexpr,
):  # fmt: skip
    """Store grad * a + x * b + c, by three rows of a table; grad is pulled back through phi and its
    scale where there is an inner map.
    """
    place = place_of(
        outer_stride, inner, inner_stride, stride, lanes, runs, share, by_inner, sets, TILE
    )
    a, b, c = load_rows(Table, 0, 3, place)
    a *= affine_of_sets(Scale, place, 1.0, TILE)
    argument = load_argument(None, None, Inner, place, 0.0)
    operands = GradX, X, Grad, argument, (KIND, lower, upper), (a, b, c)
    over(place, store_gradient, operands, (), TILE)


# Over channels: what `_GroupAffine` computes, a program a sample and group


@triton.jit
def _group(channels, group_size, splits, share, runs, width, BLOCK):
    """Return the entries of a program: of its channels, of its sample's channels, and of its group
    for each of these.
    """
    within = tl.arange(0, BLOCK)[None, :]
    channel = tl.program_id(1) * group_size + within
    sets = tl.program_id(0) * channels + channel
    total = tl.num_programs(0) * channels
    valid = within < group_size
    shared = Shared(sets, valid, total, splits, share, runs, width)
    group = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1) + within * 0
    groups = tl.num_programs(0) * tl.num_programs(1)
    return Entries(channel, valid, channels), shared, Entries(group, valid, groups)


@triton.jit
def _load_constants(Mean, Var, Gain, Weight, SourceEps, channel):
    """Return mean, 1 / std, gain and gamma."""
    var = load_entries(Var, channel, 1.0)
    rstd = 1 / tl.sqrt(var + tl.load(SourceEps).to(tl.float32))
    mean, gain = load_entries(Mean, channel, 0.0), load_entries(Gain, channel, 1.0)
    return mean, rstd, gain, load_entries(Weight, channel, 1.0)


@triton.jit
def _group_sum(channel, numbers):
    """Add up numbers of a group's channels."""
    return tl.sum(tl.where(channel.valid, numbers, 0.0), 1, keep_dims=True)


@triton.jit(do_not_specialize=["channels", "group_size", "splits", "runs", "share", "width"])
def migration_kernel(
    Table, Groups, Parts, Mean, Var, Gain, Weight, Bias, Code, Eps, SourceEps, unit,
    channels, group_size, splits, runs, share, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the moments of a group's channels into scale and shift of x; keep the group's mean, k
    and t.
    """
    channel, shared, group = _group(channels, group_size, splits, share, runs, width, BLOCK)
    row_mean, squares = merge_moments(Parts, shared, 1)
    row_var = squares / (runs * width).to(tl.float32)
    mean, rstd, gain, gamma = _load_constants(Mean, Var, Gain, Weight, SourceEps, channel)
    scale = rstd * gain
    centre = (row_mean - mean) * scale
    m = _group_sum(channel, centre) / group_size
    deviation = centre - m
    v = _group_sum(channel, row_var * scale * scale + deviation * deviation) / group_size
    t = tl.load(Code).to(tl.float32) * unit
    # At t = 0 the moments do not count, not even where they overflow
    m, v = tl.where(t > 0, m, 0.0), tl.where(t > 0, v, 1.0)
    k = 1 / tl.sqrt(1 - t + t * (v + tl.load(Eps).to(tl.float32)))
    shift = load_entries(Bias, channel, 0.0) - k * gamma * (mean * rstd + t * m / gain)
    store_rows(Table, 0, shared, (k * gamma * rstd, shift))
    store_rows(Groups, 0, group, (m, k, t))


@triton.jit(do_not_specialize=["channels", "group_size", "splits", "size"])
def migration_gradients_kernel(
    Table, Sums, Groups, Parts, Mean, Var, Gain, Weight, SourceEps,
    channels, group_size, splits, size, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the rows of `combine_kernel`, and the sums of grad * x^ and grad; see `_GroupAffine`.
    Behind them, those for a proxy.
    """
    channel, shared, group = _group(channels, group_size, splits, 1, 1, size, BLOCK)
    sums = sum_parts(Parts, ROWS, shared, 1)
    sum_g = sums[0]
    m, k, t = load_rows(Groups, 0, 3, group)
    mean, rstd, gain, gamma = _load_constants(Mean, Var, Gain, Weight, SourceEps, channel)
    m = m / gain
    sum_gx = (sums[1] * rstd - t * m * sum_g) * k
    total = (group_size * size).to(tl.float32)
    mean_gx = _group_sum(channel, sum_gx * gamma) / total
    mean_g = _group_sum(channel, sum_g * gamma / gain) / total
    slope = -t * (k * gain) * (k * gain) * mean_gx
    shift = -t * k * gain * mean_g - slope * (mean * rstd + m)
    store_rows(Table, 0, shared, (k * gamma * rstd, slope * rstd * rstd, shift * rstd))
    store_rows(Sums, 0, shared, (sum_gx, sum_g) + sums[2:])


def _launch_on_groups(kernel: Any, x: Tensor, groups: Tensor, tensors: Any, sizes: Any) -> None:
    """Launch a program for each sample and group."""
    _, samples, num_groups = groups.shape
    channels = x.shape[1]
    group_size = channels // num_groups
    block = triton.next_power_of_2(group_size)
    grid = samples, num_groups
    launcher.launch_on(kernel, grid, *tensors, channels, group_size, *sizes, block)


class Migration(NamedTuple):
    """Scale and shift of each sample and channel, (2, N * C), by which `migrated_group_norm` maps
    x, and what its derivative takes of each group: mean, k and t, (3, N, G).
    """

    plan: LaunchPlan
    # mean, var, gain and source_eps
    constants: tuple[Tensor | None, ...]
    table: Tensor
    groups: Tensor

    def gradients(
        self, x: Tensor, grad: Tensor, weight: Tensor | None, inner: _Inner | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of x, and sums over samples that are those of gamma and beta, (2, C);
        behind an inner map, (4, C) with those of its scale and shift.
        """
        samples, channels = x.shape[:2]
        mean, var, gain, source_eps = self.constants
        plan = self.plan
        rows = 2 if inner is None else 4
        table, scale, (kind, *bounds) = inner or (None, None, IDENTITY)
        behind = table, scale, *bounds, kind
        grad = laid_out_as(x, grad)
        parts = launcher.room(x, rows, plan.splits, plan.sets)
        launcher.launch(products_kernel, plan, parts, x, grad, mean, *behind)
        slopes = launcher.room(x, 3, plan.sets)
        sums = launcher.room(x, rows, samples, channels)
        tensors = slopes, sums, self.groups, parts, mean, var, gain, weight, source_eps
        sizes = plan.splits, x.numel() // (samples * channels), rows
        _launch_on_groups(migration_gradients_kernel, x, self.groups, tensors, sizes)
        grad_x = torch.empty_like(x)
        launcher.launch(combine_kernel, plan, grad_x, x, grad, slopes, *behind)
        return grad_x, sums.sum(1)


def migrate(
    x: Tensor,
    numbers: tuple[int, Strength, Tensor | float, Tensor | float],
    tensors: tuple[Tensor | None, ...],
) -> Migration | None:
    """Reduce (N, C, *) to what `migrated_group_norm` takes of it, None where kernels cannot. The
    numbers are groups, strength, eps and the source's eps; the tensors, (C,) each, are weight,
    bias, mean, var and gain.
    """
    num_groups, strength, *both_eps = numbers
    eps, source_eps = (torch.as_tensor(number, device=x.device) for number in both_eps)
    plan = channel_plan(x, per_sample=True)
    if plan is None:
        return None
    parts = launcher.room(x, 2, plan.splits, plan.sets)
    launcher.launch(moments_kernel, plan, parts, x)
    table = launcher.room(x, 2, plan.sets)
    groups = launcher.room(x, 3, len(x), num_groups)
    weight, bias, *constants = tensors
    factors = strength.source, eps, source_eps, strength.unit
    sizes = plan.splits, *plan.shares
    operands = table, groups, parts, *constants, weight, bias, *factors
    _launch_on_groups(migration_kernel, x, groups, operands, sizes)
    return Migration(plan, (*constants, source_eps), table, groups)


class MigratedNormOnGPU(torch.autograd.Function):
    """`migrated_group_norm` by its migration, with derivatives by x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, migration: Migration
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.migration = migration
        # For a `ProxyNorm` that finds this node behind its input
        ctx.affine = weight, bias
        ctx.source = TensorWeakRef(x)
        ctx.version = x._version
        scale, shift = migration.table
        return launch_map(x, scale, shift, migration.plan)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x, sums = ctx.migration.gradients(x, grads[0], weight)
        return grad_x, *needed(ctx, 1, sums), None


def input_of(y: Tensor, *affine: Tensor | None) -> tuple[Tensor, Migration] | None:
    """Return what a norm made `y` of, with this gamma and beta, if no one has changed either since
    or looks at the gradient of `y`; else None.

    The graph of derivatives says so: its node is replaced when a tensor is written to.
    """
    node: Any = y.grad_fn
    if not isinstance(node, MigratedNormOnGPU._backward_cls) or y._version or y._backward_hooks:
        return None
    x = node.source()
    is_own = all(a is b for a, b in zip(node.affine, affine, strict=True))
    if x is None or x._version != node.version or not is_own or y.retains_grad:
        return None
    return x, node.migration
