"""The formulas run by torch, operation by operation, over blocks of whole sets that stay in the processor's cache.

Sets are independent of each other, so a block goes through the complete forward or backward before the next is
touched: main memory is passed over once, and no intermediate is larger than a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from retrofit.layers.kernels import formulas, noise
from retrofit.layers.kernels.formulas import Noise, reductions

_Maybe = TypeVar("_Maybe", Tensor, Tensor | None)
_BLOCK = 2**18  # elements: large enough for a call's overhead, small enough for the last-level cache


def forward(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    t: Tensor,
    dims: tuple[int, ...],
    eps: float,
    factor: Tensor,
    seed: Tensor | None,
    group: ProcessGroup | None,
) -> Tensor:
    """Normalize over the sets that span `dims`; tensors are in a layout's view.

    Args:
        out: Room for the result.
        x: The input.
        weight: gamma, of as many dimensions, or None.
        bias: beta, the same.
        t: The strength, a 0-dim tensor of the computation's type.
        dims: Dimensions of a set.
        eps: Added to the variance.
        factor: xi * t, a 0-dim tensor.
        seed: The noise's, or None for no noise.
        group: Ranks that share the sets, or None.

    Returns:
        `formulas.Kept` of each set, stacked.
    """
    stats = []
    for block in blocks(x, dims, group is not None):
        part, found = formulas.forward(
            block(x), block.of(weight), block.of(bias), t, eps, block.noise(x, factor, seed), reductions(dims, group)
        )
        block(out).copy_(part)
        stats.append(found)
    return torch.cat(stats, block.axis + 1)


def backward(
    grad_x: Tensor,
    x: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    t: Tensor,
    stats: Tensor,
    dims: tuple[int, ...],
    factor: Tensor,
    seed: Tensor | None,
    affine: tuple[int, ...],
    group: ProcessGroup | None,
) -> Tensor:
    """Fill `grad_x`; return the affine parameters' gradients, (2, *affine) and in float32 at least."""
    grads = torch.zeros((2, *affine), dtype=stats.dtype, device=x.device)
    for block in blocks(x, dims, group is not None):
        part, y = formulas.backward(
            block(grad),
            block(x),
            block.of(weight),
            t,
            torch.stack([block.of(s) for s in stats]),
            block.noise(x, factor, seed),
            reductions(dims, group),
        )
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


class _Block:
    """A slice of whole sets along one dimension."""

    def __init__(self, axis: int, start: int, size: int) -> None:
        self.axis, self.start, self.size = axis, start, size

    def __call__(self, x: Tensor) -> Tensor:
        return x.narrow(self.axis, self.start, self.size)

    def of(self, x: _Maybe) -> _Maybe:
        """Slice `x` unless it broadcasts."""
        return x if x is None or x.shape[self.axis] == 1 else self(x)

    def noise(self, x: Tensor, factor: Tensor, seed: Tensor | None) -> Noise | None:
        if seed is None:
            return None
        moved = noise.advance(seed, self.start * x.stride(self.axis)).to(x.device)
        return Noise(factor, partial(noise.normal, self(x).shape, moved, x.stride()))


def blocks(x: Tensor, dims: tuple[int, ...], whole: bool = False) -> Iterator[_Block]:
    """Slice evenly along the outermost dimension that separates sets; `dims` are those of a set, counted from 0.

    One block is the whole tensor if `whole`, on a GPU, which large operations keep busy, and for a compiler.
    """
    axis = next((d for d in range(x.ndim) if d not in dims), None)
    total = x.shape[axis or 0]
    whole = whole or axis is None or x.is_cuda or torch.compiler.is_compiling()
    count = 1 if whole else min(total, -(-x.numel() // _BLOCK))
    for i in range(count):
        start = total * i // count
        yield _Block(axis or 0, start, total * (i + 1) // count - start)
