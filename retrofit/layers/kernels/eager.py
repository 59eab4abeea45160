"""Algorithm 1 of Eftekhari & Papyan (2025), the closed form of its backward, and its noise, in
torch's operations.

`normalized` and `pulled_back` take a whole tensor: the one definition, which a compiler traces, and
which normality.cpp and the Triton kernels mirror. `forward` and `backward` run them over blocks of
whole sets that stay in the processor's cache. Sets are independent of each other, so a block goes
through all of it before the next is touched: main memory is passed over once, and no intermediate
is larger than a block. Nothing here is seen by autograd. Everything is computed in float32 (float64
for float64 input).

Noise is a function of position and seed, so that it needs no storing and no order. Element i of
seed (s0, s1) is a hash of i, mapped through the normal quantile: whoever computes it, on whatever
device and in whatever order, gets the same number (to the rounding of a logarithm). Tails reach 6.3
standard deviations.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers.kernels.layout import Layout
from retrofit.layers.power_transform import (
    Reductions,
    StepGradient,
    first_step,
    lmbda_derivative,
    step_derivative,
)

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)
_BLOCK = (
    2**18
)  # elements: large enough for a call's overhead, small enough for the last-level cache
# stands for p = 0: expm1(p * l) / p is then l, to the bit
_NEAR_ZERO = 1e-20

FIELDS = 10
"""Numbers kept of each set, stacked: mean, variance, 1 / std, lambda's step, its `StepGradient`,
the noise's scale.
"""

# Noise: |z| = (1 - v) * P(w) / Q(w), with v the two-sided tail probability and w = -log(v * (2 -
# v)); 1e-7 relative
NUMERATOR = (
    *(2.928853064076975e-05, 0.0009993967832997441, 0.011874854564666748),
    *(0.08982928842306137, 0.4523918926715851, 1.2533142566680908),
)
DENOMINATOR = (
    *(1.0084270343213575e-06, 0.00016978503845166415, 0.0022797624114900827),
    *(0.032670583575963974, 0.09915989637374878, 1.0),
)
# Shifts and multipliers of an integer finaliser with full avalanche ("triple32" of Wellons'
# hash-prospector)
_ROUNDS = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))

Noise = Callable[
    [Tensor], Tensor
]  # the noise to add, of the input's shape, by the spread of each set


def compute_dtype(x: Tensor) -> torch.dtype:
    """Float64 stays; everything else is computed in float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    t: Tensor,
    eps: float,
    noise: Noise | None,
    over: Reductions,
) -> tuple[Tensor, Tensor]:
    """Return the result in `x`'s dtype and `FIELDS` numbers of each set; `weight` and `bias`
    broadcast to `x`.
    """
    values = x.to(compute_dtype(x))
    mean, var = _mean_and_variance(values, over)
    rstd = torch.rsqrt(var + eps)
    y, step, gradient = gaussianized((values - mean) * rstd, t, over)
    spread = torch.zeros_like(mean)
    if noise is not None:
        (centre,) = over.means([y])
        (spread,) = over.means([(y - centre).abs()])
        y = y + noise(spread)
    stats = torch.stack([mean, var, rstd, step, *gradient, spread])
    return affine(y, weight, bias).to(x.dtype), stats


def pulled_back(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    t: Tensor,
    stats: Tensor,
    noise: Noise | None,
    over: Reductions,
) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to `x`, in its dtype, and y with its noise, which gamma
    multiplied.
    """
    dtype = compute_dtype(x)
    mean, _, rstd, step, *gradient, spread = stats.unbind()
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
    if noise is not None:
        y = y + noise(spread)
    return grad_x.to(x.dtype), y


def gaussianized(h: Tensor, t: Tensor, over: Reductions) -> tuple[Tensor, Tensor, StepGradient]:
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


def by_constants(x: Tensor, constants: Tensor) -> Tensor:
    """Return the affine of the transform of `x` by five numbers a set: mean, 1 / std, lambda - 1,
    gamma and beta.
    """
    mean, rstd, change, gamma, beta = constants.unbind()
    h = (x.to(constants.dtype) - mean) * rstd
    y, _, _ = transform(h, torch.log1p(h.abs()), change)
    return (y * gamma + beta).to(x.dtype)


def _mean_and_variance(x: Tensor, over: Reductions) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, the mean corrected once so that a large constant set has neither
    offset nor spread.
    """
    (mean,) = over.means([x])
    centred = x - mean
    offset, power = over.means([centred, centred * centred])
    return mean + offset.nan_to_num(0.0), (power - offset * offset).clamp_min(0)


def transform(h: Tensor, log: Tensor, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return psi(h; 1 + change), u = p * l and expm1(u), of which psi is s / p times; `log` is
    log(1 + |h|).
    """
    up = 1 + change
    down = 1 - change
    up = torch.where(up == 0, _NEAR_ZERO, up)
    down = torch.where(down == 0, _NEAR_ZERO, down)
    below = h < 0
    u = log * torch.where(below, down, up)
    growth = torch.expm1(u)
    by_power = torch.where(below, -1 / down, 1 / up)
    return growth * by_power, u, growth


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y * weight + bias, either of which may be None, in `y`'s dtype."""
    if weight is None:
        return y if bias is None else y + bias.to(y.dtype)
    scaled = y * weight.to(y.dtype)
    return scaled if bias is None else scaled + bias.to(y.dtype)


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
    """Return random bits for each position."""
    for place, (shift, multiplier) in enumerate(_ROUNDS):
        key = _mix(key, shift)
        if place == 1:
            key = key + seed[1]
        key = key * multiplier
    return _mix(key, 14)


def _mix(key: Tensor, shift: int) -> Tensor:
    # a logical shift
    return key ^ ((key >> shift) & ((1 << (32 - shift)) - 1))


class Strength(NamedTuple):
    """t: the first element of a tensor, times a unit. Kernels on a GPU read it there."""

    source: Tensor
    unit: float = 1.0

    def value(self, dtype: torch.dtype) -> Tensor:
        """Return t as a 0-dim tensor."""
        first = self.source.detach().reshape(-1)[0].to(dtype)
        return first if self.unit == 1 else first * self.unit

    def times(self, alpha: float) -> Tensor:
        """Return the factor of lambda's step: t * alpha."""
        return self.source if alpha == 1 else self.source * alpha

    def noise(self, xi: float) -> Tensor | None:
        """Return the factor of the noise: t * xi; None for no noise."""
        return xi * self.source if xi else None


class Running(NamedTuple):
    """Buffers that follow the batch's statistics, (C,) each; None where there is none.

    `tracked` counts batches; without a momentum the buffers are the average over them.
    """

    mean: Tensor | None
    var: Tensor | None
    lmbda: Tensor | None
    tracked: Tensor | None
    momentum: float | None


class KernelOptions(NamedTuple):
    """What the kernels take beside tensors, which are given as views by their sets."""

    layout: Layout
    strength: Strength
    # added to the variance
    eps: float
    # lambda's step is multiplied by strength times alpha
    alpha: float = 1.0
    # xi; strength times it is the factor of the noise
    noise: float = 0.0
    # of the noise, on the device of the tensors
    seed: Tensor | None = None
    # ranks that share the sets
    group: ProcessGroup | None = None
    # moved by kernels that read the strength themselves
    running: Running | None = None

    @property
    def t(self) -> Tensor:
        return self.strength.times(self.alpha)

    @property
    def factor(self) -> Tensor | None:
        return self.strength.noise(self.noise)


READS_STRENGTH = False
"""Whether `KernelOptions.strength` may be a buffer that changes after the call, and
`KernelOptions.running` is moved.
"""


def forward(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions
) -> Tensor:
    """Fill `out` with the result; return `FIELDS` numbers of each set."""
    layout = options.layout
    out = layout.view(out)
    x = layout.view(x)
    weight = layout.view_affine(weight)
    bias = layout.view_affine(bias)
    over = Reductions(layout.dims, options.group)
    stats = []
    for block in blocks(x, layout.dims, options.group is not None):
        noise = block.noise(x, options)
        affine = block.of(weight), block.of(bias)
        part, kept = normalized(block(x), *affine, options.t, options.eps, noise, over)
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
    over = Reductions(layout.dims, options.group)
    to_weight = torch.zeros(layout.affine, dtype=stats.dtype, device=x.device)
    to_bias = torch.zeros_like(to_weight)
    for block in blocks(x, layout.dims, options.group is not None):
        noise = block.noise(x, options)
        kept = torch.stack([block.of(row) for row in stats])
        g = block(grad)
        part, y = pulled_back(g, block(x), block.of(weight), options.t, kept, noise, over)
        block(grad_x).copy_(part)
        g = g.to(y.dtype)
        _add(block.of(to_weight), g * y)
        _add(block.of(to_bias), g)
    return torch.stack([to_weight, to_bias])


def _add(total: Tensor, share: Tensor) -> None:
    total += share.sum_to_size(total.shape)


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """Fill `out` with `by_constants` of five numbers a set, stacked: mean, 1 / std, lambda - 1,
    gamma and beta.
    """
    for block in blocks(x, ()):
        block(out).copy_(by_constants(block(x), torch.stack([block.of(c) for c in constants])))


class _Block(NamedTuple):
    """A slice of whole sets along one dimension."""

    axis: int
    start: int
    size: int

    def __call__(self, x: Tensor) -> Tensor:
        return x.narrow(self.axis, self.start, self.size)

    def of(self, x: _Maybe) -> _Maybe:
        return x if x is None or x.shape[self.axis] == 1 else self(x)

    def noise(self, x: Tensor, options: KernelOptions) -> Noise | None:
        factor, seed = options.factor, options.seed
        if factor is None or seed is None:
            return None
        first = self.start * x.stride(self.axis)
        return lambda spread: normal(self(x).shape, seed, x.stride(), first) * (factor * spread)


def blocks(x: Tensor, dims: tuple[int, ...], whole: bool = False) -> Iterator[_Block]:
    """Slice evenly along the outermost dimension that separates sets; `dims` are those of a set,
    counted from 0. One block is the whole tensor if `whole`, on a GPU, which large operations keep
    busy, and for a compiler.
    """
    axis = next((d for d in range(x.ndim) if d not in dims), None)
    total = x.shape[axis or 0]
    whole = whole or axis is None or x.is_cuda or torch.compiler.is_compiling()
    count = 1 if whole else min(total, -(-x.numel() // _BLOCK))
    for i in range(count):
        start = total * i // count
        yield _Block(axis or 0, start, total * (i + 1) // count - start)
