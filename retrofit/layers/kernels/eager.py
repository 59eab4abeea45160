"""Algorithm 1 of Eftekhari & Papyan (2025) and the closed form of its backward, in torch's
operations.

`normalized` and `pulled_back` take a whole tensor: the one definition, which a compiler traces, and
which normality.cpp and the Triton kernels mirror. `forward` and `backward` run them over blocks of
whole sets that stay in the processor's cache. Sets are independent of each other, so a block goes
through all of it before the next is touched: main memory is passed over once, and no intermediate
is larger than a block. Nothing here is seen by autograd. Everything is computed in float32 (float64
for float64 input).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from retrofit.layers.kernels.kernel_options import KernelOptions
from retrofit.layers.kernels.layout import Layout
from retrofit.layers.kernels.normal_numbers import normal
from retrofit.layers.power_transform import (
    Reductions,
    StepGradient,
    first_step,
    lmbda_derivative,
    step_derivative,
    transform,
)

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)
# Elements: large enough for a call's overhead, small enough for the last-level cache
_BLOCK = 2**18

FIELDS = 10
"""Numbers kept of each set, stacked: mean, variance, 1 / std, lambda's step, the five of its
`StepGradient`, and the spread of y (its mean absolute deviation), 0 without noise.
"""

DrawNoise = Callable[[Tensor], Tensor]
"""Returns the noise to add, of the input's shape, by the spread of each set."""

READS_STRENGTH = False
"""Whether `KernelOptions.strength` may be a buffer that changes after the call, and
`KernelOptions.running` is moved.
"""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Float64 stays; everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    t: Tensor,
    eps: float,
    draw_noise: DrawNoise | None,
    over: Reductions,
) -> tuple[Tensor, Tensor]:
    """Return the result in `x`'s dtype and `FIELDS` numbers of each set; `weight` and `bias`
    broadcast to `x`.
    """
    values = x.to(compute_dtype(x))
    mean, var = _mean_and_variance(values, over)
    rstd = torch.rsqrt(var + eps)
    y, step, gradient = transform_by_first_step((values - mean) * rstd, t, over)
    spread = torch.zeros_like(mean)
    if draw_noise is not None:
        (centre,) = over.means([y])
        (spread,) = over.means([(y - centre).abs()])
        y = y + draw_noise(spread)
    stats = torch.stack([mean, var, rstd, step, *gradient, spread])
    return affine(y, weight, bias).to(x.dtype), stats


def pulled_back(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    t: Tensor,
    stats: Iterable[Tensor],
    draw_noise: DrawNoise | None,
    over: Reductions,
) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to `x`, in its dtype, and y with its noise, which gamma
    multiplied.
    """
    dtype = compute_dtype(x)
    mean, _, rstd, step, *gradient, spread = stats
    h = (x.to(dtype) - mean) * rstd
    g = grad.to(dtype)
    if weight is not None:
        g = g * weight.to(dtype)
    y, direct, to_lmbda, shift = pulls(g, h, t, step, StepGradient(*gradient))
    # d psi / d h is linear in the mean gradient of lambda, so one reduction serves all three
    # projections.
    products = [to_lmbda, direct, direct * h, shift, shift * h]
    to_lmbda, direct_mean, direct_h, shift_mean, shift_h = over.means(products)
    to_lmbda = t * to_lmbda
    pull = direct + to_lmbda * shift
    along_one = direct_mean + to_lmbda * shift_mean
    along_h = direct_h + to_lmbda * shift_h
    grad_x = rstd * (pull - along_one - h * along_h)
    if draw_noise is not None:
        y = y + draw_noise(spread)
    return grad_x.to(x.dtype), y


def transform_by_first_step(
    h: Tensor, t: Tensor, over: Reductions
) -> tuple[Tensor, Tensor, StepGradient]:
    """Return psi of standardized values by t times their step, the step of each set, and its
    gradient.
    """
    log = torch.log1p(h.abs())
    step, gradient = first_step(h, over, log)
    return transform(h, log, t * step)[0], step, gradient


def pulls(
    grad: Tensor, h: Tensor, t: Tensor, step: Tensor, gradient: StepGradient
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return psi, `grad` times its derivatives by h and by lambda, and the set's size times d step
    / d h.
    """
    a = h.abs()
    log, inverse = torch.log1p(a), 1 / (1 + a)
    y, u, growth = transform(h, log, t * step)
    # psi' = exp(u) / (1 + a)
    direct = grad * ((growth + 1) * inverse)
    return (
        y,
        direct,
        grad * lmbda_derivative(u, log, growth),
        step_derivative(h, a, log, inverse, gradient),
    )


def _mean_and_variance(x: Tensor, over: Reductions) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, the mean corrected once so that a large constant set has neither
    offset nor spread.
    """
    (mean,) = over.means([x])
    centred = x - mean
    offset, power = over.means([centred, centred * centred])
    return mean + offset.nan_to_num(0.0), (power - offset * offset).clamp_min(0)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y * weight + bias, either of which may be None, in `y`'s dtype."""
    if weight is not None:
        y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def forward(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions
) -> Tensor:
    """Fill `out` with the result; return `FIELDS` numbers of each set."""
    layout = options.layout
    out = layout.view(out)
    x = layout.view(x)
    weight = layout.view_affine(weight)
    bias = layout.view_affine(bias)
    over = Reductions(layout.dims)
    t = options.step_factor
    stats = []
    for block in blocks(x, layout.dims):
        draw_noise = block.noise_of(x, options)
        affine = block.of(weight), block.of(bias)
        part, kept = normalized(block(x), *affine, t, options.eps, draw_noise, over)
        block(out).copy_(part)
        stats.append(kept)
    return torch.cat(stats, block.axis + 1)


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    options: KernelOptions,
) -> Tensor:
    """Fill `grad_x`; return the affine parameters' gradients, (2, *affine) and in float32 at
    least.
    """
    layout = options.layout
    grad_x = layout.view(grad_x)
    x = layout.view(x)
    grad = layout.view(grad)
    weight = layout.view_affine(weight)
    over = Reductions(layout.dims)
    t = options.step_factor
    gradients = torch.zeros(2, *layout.affine, dtype=stats.dtype, device=x.device)
    to_weight, to_bias = gradients
    for block in blocks(x, layout.dims):
        draw_noise = block.noise_of(x, options)
        kept = map(block.of, stats)
        g = block(grad)
        part, y = pulled_back(g, block(x), block.of(weight), t, kept, draw_noise, over)
        block(grad_x).copy_(part)
        g = g.to(y.dtype)
        _add(block.of(to_weight), g * y)
        _add(block.of(to_bias), g)
    return gradients


def _add(total: Tensor, share: Tensor) -> None:
    total += share.sum_to_size(total.shape)


def apply(out: Tensor, x: Tensor, layout: Layout, constants: Tensor) -> None:
    """Fill `out` with the affine of the transform of `x` by five numbers a set, stacked: mean,
    1 / std, lambda - 1, gamma and beta.
    """
    out = layout.view(out)
    x = layout.view(x)
    for block in blocks(x, ()):
        mean, rstd, change, gamma, beta = map(block.of, constants)
        h = (block(x).to(mean.dtype) - mean) * rstd
        y, _, _ = transform(h, torch.log1p(h.abs()), change)
        block(out).copy_(y * gamma + beta)


class _Block(NamedTuple):
    """A slice of whole sets along one dimension."""

    axis: int
    start: int
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        return x.narrow(self.axis, self.start, self.size)

    def of(self, x: _Maybe) -> _Maybe:
        return x if x is None or x.shape[self.axis] == 1 else self(x)

    def noise_of(self, x: Tensor, options: KernelOptions) -> DrawNoise | None:
        """Return what draws the slice's noise; elements are numbered by their place in memory."""
        seed = options.seed
        if seed is None:
            return None
        factor = options.noise_factor
        first = self.start * x.stride(self.axis)
        return lambda spread: normal(self(x).shape, seed, x.stride(), first) * (factor * spread)


def blocks(x: Tensor, dims: tuple[int, ...]) -> Iterator[_Block]:
    """Slice evenly along the outermost dimension that separates sets; `dims` are those of a set,
    counted from 0. One block is the whole tensor on a GPU, which large operations keep busy, and
    for a compiler.
    """
    axis = next((d for d in range(x.ndim) if d not in dims), None)
    total = x.shape[axis or 0]
    whole = axis is None or x.is_cuda or torch.compiler.is_compiling()
    count = 1 if whole else min(total, -(-x.numel() // _BLOCK))
    for i in range(count):
        start = total * i // count
        yield _Block(axis or 0, start, total * (i + 1) // count - start)
