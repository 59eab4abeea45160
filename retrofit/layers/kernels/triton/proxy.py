"""Proxy-normalized activations: scale and shift from samples of a proxy of each channel, what
`ProxyNorm.constants` computes, and their derivatives.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrofit.layers.function_transforms import differentiable_once, needed
from retrofit.layers.kernels.channelwise import Activation, quantiles
from retrofit.layers.kernels.kernel_options import Strength
from retrofit.layers.kernels.triton import launcher
from retrofit.layers.kernels.triton.activations import phi
from retrofit.layers.kernels.triton.maps import launch_map, launch_map_backward
from retrofit.layers.kernels.triton.migration import Migration
from retrofit.layers.kernels.triton.tables import (
    Entries,
    load_entries,
    load_numbers,
    load_rows,
    store_rows,
)
from retrofit.layers.kernels.triton_plan import LaunchPlan

# Channels that a program takes
_CHANNELS = 4


@triton.jit
def _samples(
    Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channels, samples,
    BLOCK, WIDTH,
):  # fmt: skip
    """Return a program's channels, samples of the proxy, one a row, which there are, and what
    scaled them.
    """
    channel = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    entries = Entries(channel, channel < channels, channels)
    gamma, beta = load_entries(Gamma, entries, 1.0), load_entries(Beta, entries, 0.0)
    proxy_scale = 1 + load_entries(ProxyScale, entries, 0.0)
    proxy_bias = load_entries(ProxyBias, entries, 0.0)
    sample = tl.arange(0, BLOCK)[:, None]
    quantile = load_numbers(Quantiles, sample, sample < samples, 0.0)
    y = quantile * (proxy_scale * gamma) + (proxy_bias * gamma + beta)
    mask = (sample < samples) & entries.valid
    return entries, y, mask, quantile, gamma, proxy_scale, proxy_bias


@triton.jit
def _scale(RestoreScale, entries, std, DIVIDE):
    """Return the scale of phi at strength 1."""
    if DIVIDE:
        return load_entries(RestoreScale, entries, 1.0) / std
    else:
        return std * 0 + 1


@triton.jit(do_not_specialize=["channels", "samples"])
def proxy_kernel(
    Table, Gamma, Beta, ProxyScale, ProxyBias, RestoreScale, RestoreShift, Quantiles, Code, unit,
    eps, lower, upper, channels, samples,
    KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the scale and shift of phi at strength t, and the proxy's mean and std, and t."""
    entries, y, mask, _, _, _, _ = _samples(
        Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channels, samples, BLOCK, WIDTH
    )
    value, _ = phi(y, lower, upper, KIND)
    mean = tl.sum(tl.where(mask, value, 0.0), 0, keep_dims=True) / samples
    deviation = tl.where(mask, value - mean, 0.0)
    std = tl.sqrt(tl.sum(deviation * deviation, 0, keep_dims=True) / samples + eps)
    scale = _scale(RestoreScale, entries, std, DIVIDE)
    shift = load_entries(RestoreShift, entries, 0.0) - scale * mean
    t = tl.load(Code).to(tl.float32) * unit
    store_rows(Table, 0, entries, (1 + t * (scale - 1), t * shift, mean, std, t))


@triton.jit(do_not_specialize=["channels", "samples"])
def proxy_gradients_kernel(
    Gradients, Sums, NormSums, Table, Gamma, Beta, ProxyScale, ProxyBias, RestoreScale, Quantiles,
    lower, upper, channels, samples,
    KIND: tl.constexpr, DIVIDE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store the gradients of gamma, beta, proxy_scale and proxy_bias, by those of scale and shift.
    Those of gamma and beta by the norm itself, `NormSums`, are added.
    """
    entries, y, mask, quantile, gamma, proxy_scale, proxy_bias = _samples(
        Gamma, Beta, ProxyScale, ProxyBias, Quantiles, channels, samples, BLOCK, WIDTH
    )
    value, slope = phi(y, lower, upper, KIND)
    mean, std, t = load_rows(Table, 2, 3, entries)
    std = tl.where(entries.valid, std, 1.0)
    to_scale, to_shift = load_rows(Sums, 0, 2, entries)
    scale = t * _scale(RestoreScale, entries, std, DIVIDE)
    to_phi = -to_shift * scale
    if DIVIDE:
        to_phi -= (to_scale - to_shift * mean) * scale / (std * std) * (value - mean)
    to_y = tl.where(mask, to_phi * slope / samples, 0.0)
    by_quantile = tl.sum(to_y * quantile, 0, keep_dims=True)
    plain = tl.sum(to_y, 0, keep_dims=True)
    to_gamma, to_beta = by_quantile * proxy_scale + plain * proxy_bias, plain
    if NormSums is not None:
        by_norm = load_rows(NormSums, 0, 2, entries)
        to_gamma, to_beta = to_gamma + by_norm[0], to_beta + by_norm[1]
    store_rows(Gradients, 0, entries, (to_gamma, to_beta, by_quantile * gamma, plain * gamma))


class Proxy(NamedTuple):
    """What a `ProxyNorm` computes its constants from."""

    # see `channelwise.known`
    activation: Activation
    strength: Strength
    eps: float
    # whether it divides by the proxy's std, and how many samples the proxy has
    divide: bool
    samples: int
    # (C,) each
    restore_scale: Tensor | None
    restore_shift: Tensor | None
    channel_dim: int

    def table(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """Return scale and shift of phi, and what their derivatives take, by gamma, beta,
        proxy_scale and proxy_bias.
        """
        table = launcher.room(x, 5, x.shape[self.channel_dim])
        tensors = table, *parameters, self.restore_scale, self.restore_shift
        self._launch(proxy_kernel, table, tensors, (*self.strength, self.eps))
        return table

    def gradients(
        self, sums: Tensor, norm_sums: Tensor | None, table: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        """Return the gradients of the four parameters by `sums`, those of scale and shift; with
        those of gamma and beta by the norm itself, `norm_sums`.
        """
        gradients = launcher.room(table, 4, table.shape[1])
        tensors = gradients, sums, norm_sums, table, *parameters, self.restore_scale
        self._launch(proxy_gradients_kernel, table, tensors, ())
        return gradients

    def _launch(self, kernel: Any, table: Tensor, tensors: Any, numbers: Any) -> None:
        kind, *bounds = self.activation
        channels = table.shape[1]
        sizes = channels, self.samples, kind, self.divide, triton.next_power_of_2(self.samples)
        uniform = quantiles_on(self.samples, table.device)
        grid = (triton.cdiv(channels, _CHANNELS),)
        launcher.launch_on(kernel, grid, *tensors, uniform, *numbers, *bounds, *sizes, _CHANNELS)


@lru_cache(maxsize=16)
def quantiles_on(samples: int, device: torch.device) -> Tensor:
    """Return `channelwise.quantiles` on a device; benchmarks replace this."""
    return quantiles(samples).to(device)


class ProxyActivationOnGPU(torch.autograd.Function):
    """A proxy-normalized activation, with derivatives by x, gamma, beta, proxy_scale and
    proxy_bias.

    With a migration, `x` is the input of the `migrated_group_norm` before the activation, whose
    output is `y` if the norm has written it. The plan is of what is read: `y`, else `x`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        y: Tensor | None,
        plan: LaunchPlan,
        migration: Migration | None,
        proxy: Proxy,
        *parameters: Tensor | None,
    ) -> Tensor:
        table = proxy.table(x, *parameters)
        ctx.save_for_backward(x, table, *parameters)
        ctx.plan = plan
        ctx.migration = migration
        ctx.proxy = proxy
        inner = migration.table if migration is not None and y is None else None
        source = x if y is None else y
        return launch_map(source, table[0], table[1], plan, proxy.activation, inner=inner)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, table, *parameters = ctx.saved_tensors
        proxy = ctx.proxy
        if ctx.migration is None:
            norm_sums = None
            grad_x, sums = launch_map_backward(x, grads[0], table[0], ctx.plan, proxy.activation)
        else:
            inner = ctx.migration.table, table[0], proxy.activation
            grad_x, norm_sums = ctx.migration.gradients(x, grads[0], parameters[0], inner)
            sums = norm_sums[2:]
        gradients = proxy.gradients(sums, norm_sums, table, *parameters)
        return grad_x, None, None, None, None, *needed(ctx, 5, gradients)
