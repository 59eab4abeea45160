"""Group normalization of what a BatchNorm's running statistics have standardized: the function
behind `MigratedGroupNorm`, by kernels where they take the tensors, else by torch's operations.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retrofit.layers import kernels
from retrofit.layers.function_transforms import differentiable_once, needed, transformed
from retrofit.layers.inference_forms import channel_view
from retrofit.layers.kernels import channelwise, fits
from retrofit.layers.kernels.eager import compute_dtype
from retrofit.layers.kernels.kernel_options import Strength

GroupNumbers = tuple[int, Strength, Tensor | float, Tensor | float]
"""Number of groups, strength, and what is added to the groups' and to the running variance."""


def migrated_group_norm(
    x: Tensor,
    num_groups: int,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    strength: Strength | Tensor | float = 1.0,
    eps: Tensor | float = 1e-5,
    source_eps: Tensor | float | None = None,
    gain: Tensor | None = None,
) -> Tensor:
    """Standardize with constant running statistics, then group-normalize to the degree t =
    `strength`.

        x' = (x - running_mean) / sqrt(running_var + source_eps) * gain       per channel
        y  = (x' - t * m) / sqrt((1 - t) + t * (v + eps)) * weight / gain + bias

    where m and v are the mean and variance of x' per sample and group. At t = 0 this is
    `F.batch_norm` in evaluation, for any gain; at t = 1 it is `F.group_norm` of x' with the weight
    divided by the gain. One group normalizes each whole sample, like LayerNorm over (C, *). The
    gain determines how much a channel counts in its group's moments.

    The result is one scale and one shift per sample and channel, computed from the moments of x per
    sample and channel. Of the activations, only x is kept for the backward pass. Statistics use at
    least float32. Autograd treats running statistics, gain and t as constants; there is no second
    derivative.

    Args:
        x: Input (N, C, *), floating point, with at least 2 dimensions.
        num_groups: Number of groups G, a divisor of C.
        running_mean: Running mean of the source, (C,).
        running_var: Running variance of the source, (C,).
        weight: gamma, (C,); None for ones.
        bias: beta, (C,); None for zeros.
        strength: t in [0, 1]; if it is a 0-dim tensor, changing it does not trigger recompilation.
        eps: Added to the group variance, multiplied by t; a number or a 0-dim tensor.
        source_eps: Added to the running variance; `eps` if None.
        gain: Positive factors, (C,); None for ones.

    Returns:
        The output, (N, C, *), in the type and memory format of `x`.

    Raises:
        ValueError: If `x` has fewer than 2 dimensions or does not have C channels, or G does not
            divide C.
    """
    check_shape(x, num_groups, running_mean.numel())
    source_eps = eps if source_eps is None else source_eps
    maps = x if x.ndim > 2 else x.unsqueeze(-1)
    constants = running_mean.detach(), running_var.detach()
    tensors = weight, bias, *constants, None if gain is None else gain.detach()
    if not isinstance(strength, Strength):
        t = torch.as_tensor(strength, dtype=compute_dtype(x), device=x.device)
        strength = Strength(t.detach())
    numbers = num_groups, strength, eps, source_eps
    out = _by_kernels(maps, numbers, tensors)
    if out is None and transformed():
        out, *_ = _group_affine(maps, numbers, *tensors)
    elif out is None:
        out = _GroupAffine.apply(maps, numbers, *tensors)
    return out.view_as(x) if x.ndim == 2 else out


def check_shape(x: Tensor, num_groups: int, channels: int) -> None:
    """Refuse an input that is not (N, C, *), or whose channels do not divide into the groups.

    Raises:
        ValueError: If it is either.
    """
    if x.ndim < 2 or x.shape[1] != channels:
        raise ValueError(f"expected (N, {channels}, *), got {tuple(x.shape)}")
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"num_groups must divide the {channels} channels, got {num_groups}")


def _by_kernels(
    x: Tensor, numbers: GroupNumbers, tensors: tuple[Tensor | None, ...]
) -> Tensor | None:
    """Return the result by kernels, None where none take `x`."""
    out: Tensor
    weight, bias, mean, var, _ = tensors
    triton = kernels.triton_for(x)
    if triton is not None:
        migration = triton.migrate(x, numbers, tensors)
        if migration is None:
            return None
        out = triton.MigratedNormOnGPU.apply(x, weight, bias, migration)
        return out
    layout = channelwise.layout_of(x, *tensors, per_sample=True)
    if layout is None:
        return None
    num_groups, strength, eps, source_eps = numbers
    t = float(strength.value(torch.float32))
    if t == 0 and all(g is None or g.dtype == x.dtype for g in tensors):
        # To the last bit: there are networks that amplify a rounding error ten thousand times.
        return functional.batch_norm(x, mean, var, weight, bias, eps=float(source_eps))
    plain = num_groups, t, float(eps), float(source_eps)
    out = channelwise.MigratedNorm.apply(x, layout, plain, *tensors)
    return out


def _moments(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of `x` (N, C, *) per sample and channel, (N, C) each, without
    cancellation.
    """
    dims = tuple(range(2, x.ndim))
    size = max(1, math.prod(x.shape[2:]))
    values = x.to(dtype)
    mean = values.mean(dims, keepdim=True)
    centred = values - mean
    if transformed():
        # The norm below does not have further derivatives everywhere
        return mean.flatten(1), centred.square().mean(dims)
    # On a CPU var_mean takes several times as long
    return mean.flatten(1), torch.linalg.vector_norm(centred, dim=dims).square() / size


def _group_affine(
    x: Tensor,
    numbers: GroupNumbers,
    weight: Any,
    bias: Any,
    mean: Tensor,
    var: Tensor,
    gain: Any,
) -> tuple[Tensor, ...]:
    """Return the result by running `mean` and `var`, and what its derivative takes: t, that mean,
    rstd, gain and gamma, (C,) each, and, (N, C) each, the group's mean over the gain and k.
    """
    num_groups, strength, eps, source_eps = numbers
    dtype = compute_dtype(x)
    t = strength.value(dtype)
    ones = torch.ones_like(mean, dtype=dtype)
    gamma = ones if weight is None else weight.to(dtype)
    gain = ones if gain is None else gain.to(dtype)
    mean = mean.to(dtype)
    rstd = torch.rsqrt(var.to(dtype) + source_eps)
    groups = x.shape[0], num_groups, len(ones) // num_groups
    m, v = _group_moments(*_moments(x, dtype), mean, rstd * gain, groups)
    # At t = 0 the moments do not count, not even where they overflow.
    m = torch.where(t > 0, m, 0.0)
    v = torch.where(t > 0, v, 1.0)
    k = torch.rsqrt(torch.lerp(torch.ones_like(v), v + eps, t))
    # (a * x' - m) / a = x' - m / a: the gain enters through the moments alone.
    m = m.expand(groups).flatten(1) / gain
    k = k.expand(groups).flatten(1)
    scale = k * gamma
    shift = -scale * (mean * rstd + t * m)
    if bias is not None:
        shift = shift + bias.to(dtype)
    return _affine(x, shift, x, scale * rstd), t, mean, rstd, gain, gamma, m, k


def _group_moments(
    row_mean: Tensor, row_var: Tensor, mean: Tensor, scale: Tensor, groups: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Return the group's mean and variance of (x - mean) * scale, (N, G, 1), by moments of x for
    each sample and channel.
    """
    centre = ((row_mean - mean) * scale).reshape(groups)
    within = (row_var * scale.square()).reshape(groups)
    m = centre.mean(2, keepdim=True)
    between = (centre - m).square()
    return m, (within + between).mean(2, keepdim=True)


class _GroupAffine(torch.autograd.Function):
    """y = x * scale + shift per sample and channel, with the closed-form derivative through the
    group moments.

    With gain a, k = 1 / sqrt((1 - t) + t * (v + eps)), x^ = (x' - t * m) * k, g^ = grad * gamma /
    a, means over sample and group:

        d x' = k * (g^ - t * mean(g^) - t * k * (x' - m) * mean(g^ * x^))
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: GroupNumbers, *tensors: Any) -> Tensor:
        out, *kept = _group_affine(x, numbers, *tensors)
        ctx.num_groups = numbers[0]
        ctx.save_for_backward(x, *kept)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # m of the group, over the channel's gain
        x, t, mean, rstd, gain, gamma, m, k = ctx.saved_tensors
        dims = tuple(range(2, x.ndim))
        (grad,) = grads
        sum_g = grad.sum(dims, dtype=k.dtype)
        centred = torch.addcmul(k.new_zeros(1), grad, x).sum(dims) - mean * sum_g
        # of grad * x^
        sum_gx = (centred * rstd - t * m * sum_g) * k
        dx = None
        if ctx.needs_input_grad[0]:
            groups = len(m), ctx.num_groups, m.shape[1] // ctx.num_groups
            size = groups[2] * max(1, math.prod(x.shape[2:]))

            def group_mean(sums: Tensor) -> Tensor:
                means = (sums * gamma).view(groups).sum(2, keepdim=True) / size
                return means.expand(groups).reshape(k.shape)

            # Of the gradient in (x - mean) * rstd
            slope = -t * (k * gain).square() * group_mean(sum_gx)
            shift = -t * k * gain * group_mean(sum_g / gain) - slope * (mean * rstd + m)
            slope_in_x = channel_view(slope * rstd.square(), x)
            shift_in_x = channel_view(shift * rstd, x)
            of_moments = torch.addcmul(shift_in_x, x, slope_in_x)
            dx = _affine(x, of_moments, grad, k * gamma * rstd)
        return dx, None, *needed(ctx, 2, (sum_gx.sum(0), sum_g.sum(0))), None, None, None


def _affine(like: Tensor, shift: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Return x * scale + shift for (N, C) tables, computed in their type, in the type and memory
    format of `like`.
    """
    if shift.ndim == 2:
        shift = channel_view(shift, x)
    scale = channel_view(scale, x)
    if fits(like):
        return torch.addcmul(shift, x, scale, out=torch.empty_like(like))
    return torch.addcmul(shift, x, scale).to(like.dtype)


@torch.no_grad()
def group_gain(weight: Tensor | None, num_groups: int) -> Tensor | None:
    """Return the gain, (C,), by which channels count in their group's variance as |gamma|:
    sqrt(|gamma| / group mean).

    A trained network has switched off some of its channels by their gamma. What passes through
    those says nothing about the scale of what the next layer sees, yet would count in full. Every
    channel counts for a hundredth of the mean at least, so that training may bring it back.
    """
    if weight is None:
        return None
    power = weight.double().abs().view(num_groups, -1)
    power = power.clamp_min(0.01 * power.mean(1, keepdim=True))
    # a group that is off as a whole
    power = torch.where(power > 0, power, 1.0)
    return (power / power.mean(1, keepdim=True)).sqrt().flatten().to(weight.dtype)


@torch.no_grad()
def settled_eps(weight: Tensor | None, running_var: Tensor, eps: float, num_groups: int) -> float:
    """BatchNorm's eps as it counts in standardized units, so that a group's variance and eps add up
    to one on average.

    Standardizing leaves a channel var / (var + eps) of variance, little where the channel is nearly
    dead. GroupNorm with BatchNorm's own eps would scale what is left up again, and the network with
    it.
    """
    if running_var.is_meta:
        return eps
    short = eps / (running_var.double() + eps)
    gain = group_gain(weight, num_groups)
    return float((short if gain is None else gain.square() * short).mean())
