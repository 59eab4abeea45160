"""Batch normality normalization as operators that a compiler takes as they are.

torch.compile's own kernels for the formulas read x many times. Where Triton's kernels are chosen
for a tensor, the compiled layer is one operator forwards and one backwards in their place. Running
statistics are moved outside, for an operator with a derivative writes to none of its inputs.
"""

from typing import Any, Optional

import torch
from torch import Tensor

from retrofit.layers import kernels
from retrofit.layers.kernels.kernel_options import KernelOptions, Strength
from retrofit.layers.kernels.layout import channel_layout, dense, laid_out_as
from retrofit.layers.kernels.triton_plan import TABLE_ROWS


def takes(x: Tensor) -> bool:
    """Whether a compiler follows the operations that run now, and the operators are for `x`."""
    return (
        torch.compiler.is_compiling()
        # What is exported shall run without this package
        and not torch.compiler.is_exporting()
        and not torch._C._are_functorch_transforms_active()
        and x.ndim > 1
        and kernels.chosen_by_compiler(x.device, x.dtype)
    )


def batch_normality(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    strength: Strength,
    *,
    eps: float,
    alpha: float,
    xi: float,
) -> tuple[Tensor, Tensor]:
    """Normalize each channel of (N, C, *); see `Normalization`.

    Returns:
        The result, and mean, variance, 1 / std and lambda's step of each channel, (4, 1, C, 1...).
    """
    code, unit = strength
    out, table = torch.ops.retrofit.batch_normality(
        x, weight, bias, code, seed, unit, eps, alpha, xi
    )
    channels = x.shape[1]
    stats = table.detach()[: 4 * channels]
    return out, stats.view(4, 1, channels, *(1,) * (x.ndim - 2))


# The types as torch.library reads them in its older versions
@torch.library.custom_op("retrofit::batch_normality", mutates_args=())
def _forward(
    x: Tensor,
    weight: Optional[Tensor],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    code: Tensor,
    seed: Optional[Tensor],  # noqa: UP045
    unit: float,
    eps: float,
    alpha: float,
    xi: float,
) -> tuple[Tensor, Tensor]:
    x = dense(x)
    out = torch.empty_like(x)
    options = KernelOptions(channel_layout(x), Strength(code, unit), eps, alpha, xi, seed)
    return out, kernels.triton_kernels().forward(out, x, weight, bias, options)


@_forward.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((TABLE_ROWS + 1) * x.shape[1], dtype=torch.float32)


@torch.library.custom_op("retrofit::batch_normality_backward", mutates_args=())
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Optional[Tensor],  # noqa: UP045
    table: Tensor,
    seed: Optional[Tensor],  # noqa: UP045
    eps: float,
) -> tuple[Tensor, Tensor]:
    x = dense(x)
    grad = laid_out_as(x, grad)
    grad_x = torch.empty_like(x)
    # `table` only fills the place of the strength: the backward pass reads the factors in it.
    options = KernelOptions(channel_layout(x), Strength(table), eps, seed=seed)
    sums = kernels.triton_kernels().backward(grad_x, x, grad, weight, table, options)
    return grad_x, sums.reshape(2, -1)


@_backward.register_fake
def _(grad: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, _, seed, _, ctx.eps, *_ = inputs
    ctx.save_for_backward(x, weight, bias, output[1], seed)


def _pull_back(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, bias, table, seed = ctx.saved_tensors
    grad_x, sums = torch.ops.retrofit.batch_normality_backward(
        grad, x, weight, table, seed, ctx.eps
    )
    to_weight = None if weight is None else sums[0].to(weight.dtype)
    to_bias = None if bias is None else sums[1].to(bias.dtype)
    return grad_x, to_weight, to_bias, *(None,) * 6


_forward.register_autograd(_pull_back, setup_context=_keep)
