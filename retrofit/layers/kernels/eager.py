"""The formulas run by torch, operation by operation, over blocks of whole sets that stay in the processor's cache.

Sets are independent of each other, so a block goes through the complete forward or backward before the next is
touched: main memory is passed over once, and no intermediate is larger than a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers.kernels import formulas
from retrofit.layers.kernels.formulas import Noise, normal
from retrofit.layers.power_transform import Reductions

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)
_BLOCK = 2**18  # elements: large enough for a call's overhead, small enough for the last-level cache


class KernelOptions(NamedTuple):
    """What the kernels take beside tensors in a layout's view."""

    dims: tuple[int, ...]  # of a set
    affine: tuple[int, ...]  # shape of gamma and beta; 1 where they broadcast
    t: Tensor  # factor of lambda's step: strength times alpha, a 0-dim tensor of the computation's type
    eps: float  # added to the variance
    factor: Tensor | None = None  # of the noise: xi times strength, a 0-dim tensor; None for no noise
    seed: Tensor | None = None  # of the noise, on the device of the tensors
    group: ProcessGroup | None = None  # ranks that share the sets


def forward(out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: KernelOptions) -> Tensor:
    """Fill `out` with the result; return `formulas.FIELDS` numbers of each set."""
    over, stats = Reductions(options.dims, options.group), []
    for block in blocks(x, options.dims, options.group is not None):
        affine = block.of(weight), block.of(bias)
        part, kept = formulas.forward(block(x), *affine, options.t, options.eps, block.noise(x, options), over)
        block(out).copy_(part)
        stats.append(kept)
    return torch.cat(stats, block.axis + 1)


def backward(
    grad_x: Tensor, x: Tensor, grad: Tensor, weight: Tensor | None, stats: Tensor, options: KernelOptions
) -> Tensor:
    """Fill `grad_x`; return the affine parameters' gradients, (2, *affine) and in float32 at least."""
    over = Reductions(options.dims, options.group)
    grads = torch.zeros((2, *options.affine), dtype=stats.dtype, device=x.device)
    for block in blocks(x, options.dims, options.group is not None):
        kept, noise = torch.stack([block.of(s) for s in stats]), block.noise(x, options)
        part, y = formulas.backward(block(grad), block(x), block.of(weight), options.t, kept, noise, over)
        block(grad_x).copy_(part)
        g = block(grad).to(y.dtype)
        for whole, share in zip(grads, (g * y, g), strict=True):
            target = block.of(whole)
            target += share.sum_to_size(target.shape)
    return grads


def apply(out: Tensor, x: Tensor, dims: tuple[int, ...], constants: Tensor) -> None:
    """Fill `out` with `formulas.apply` of five numbers a set, stacked: mean, 1 / std, lambda - 1, gamma and beta."""
    for block in blocks(x, ()):
        block(out).copy_(formulas.apply(block(x), torch.stack([block.of(c) for c in constants])))


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
    """Slice evenly along the outermost dimension that separates sets; `dims` are those of a set, counted from 0. One
    block is the whole tensor if `whole`, on a GPU, which large operations keep busy, and for a compiler.
    """
    axis = next((d for d in range(x.ndim) if d not in dims), None)
    total = x.shape[axis or 0]
    whole = whole or axis is None or x.is_cuda or torch.compiler.is_compiling()
    count = 1 if whole else min(total, -(-x.numel() // _BLOCK))
    for i in range(count):
        start = total * i // count
        yield _Block(axis or 0, start, total * (i + 1) // count - start)
