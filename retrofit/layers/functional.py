"""The normalized sets of each family, and the functional forms of its layers, each beside torch's own in its arguments.

A family's sets are a view of a layer's input, and the dimensions that span a set there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from retrofit.layers import kernels
from retrofit.layers.normality_norm import NormalityOptions, Statistics, apply_statistics, normality_norm
from retrofit.layers.transforms import transformed

Sets = Callable[[Tensor], tuple[Tensor, tuple[int, ...]]]


def no_sets(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """No values share statistics: they are constants."""
    return x, ()


def batch_sets(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each channel of (N, C, *) over (N, *)."""
    return x, (0, *range(2, x.ndim))


def channel_sets(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each position of (N, C, *) over C."""
    return x, (1,)


def trailing_sets(count: int, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each sample over its last `count` dimensions."""
    return x, tuple(range(x.ndim - count, x.ndim))


def group_sets(groups: int, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Each sample and group of channels of (N, C, *) over (C / groups, *)."""
    return x.unflatten(1, (groups, -1)), tuple(range(2, x.ndim + 1))


def batch_normal_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    running_lambda: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    group: ProcessGroup | None = None,
    **options: Unpack[NormalityOptions],
) -> Tensor:
    """Batch normality normalization (Eftekhari & Papyan 2025, algorithm 1): a set is a channel over (N, *).

    Args:
        x: Input of shape (N, C, *).
        running_mean: Running mean, (C,); updated in training unless None.
        running_var: Running unbiased variance, (C,); updated in training unless None.
        running_lambda: Running lambda estimate, (C,); updated in training unless None.
        weight: gamma, (C,), or None.
        bias: beta, (C,), or None.
        training: Use the batch's statistics rather than the running ones.
        momentum: Weight of the newest batch in the running statistics.
        eps: Added to the variance.
        group: Process group to share the statistics with.
        **options: `strength` (t, by default 1; at 0 the function is `torch.nn.functional.batch_norm`), `noise` (xi, by
            default 0; in training only), `noise_kind` and `alpha`: see `normality_norm`.

    Returns:
        The result in `x`'s shape and dtype.

    Raises:
        ValueError: If training on a single value a channel, as torch's layer does.
    """
    if training and group is None and x.numel() == x.shape[1]:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {x.size()}")
    gamma, beta = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    if training:
        sets, dim = batch_sets(x)
        out, statistics = normality_norm(sets, gamma, beta, dim=dim, eps=eps, group=group, **options)
        update_running(running_mean, running_var, running_lambda, statistics, momentum)
        return out
    if running_mean is None or running_var is None or running_lambda is None:
        raise ValueError("running statistics are needed outside training")
    lmbda = 1 + options.get("strength", 1.0) * options.get("alpha", 1.0) * (running_lambda - 1)
    # A compiler or a transform cannot branch on values, and a GPU would have to be waited for.
    followed = torch.compiler.is_compiling() or transformed()
    if not followed and lmbda.is_cpu and bool((lmbda == 1).all()):  # torch's own layer, bit for bit
        return functional.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return apply_statistics(x, running_mean.view(shape), running_var.view(shape), lmbda.view(shape), gamma, beta, eps)


def layer_normal_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Unpack[NormalityOptions],
) -> Tensor:
    """Layer normality normalization: a set is each sample over `normalized_shape`, in training and after.

    Takes `x` of shape (*, *normalized_shape), and gamma and beta of `normalized_shape` or None; options as for
    `batch_normal_norm`, no noise outside training. At strength 0 the function is `torch.nn.functional.layer_norm`.

    Raises:
        RuntimeError: If `x` does not end in `normalized_shape`, as torch's layer does.
    """
    shape = tuple(normalized_shape)
    if x.shape[x.ndim - len(shape) :] != shape:
        raise RuntimeError(f"expected input that ends in normalized_shape={list(shape)}, but got {list(x.shape)}")
    sets, dim = trailing_sets(len(shape), x)
    return normality_norm(sets, weight, bias, dim=dim, eps=eps, **options)[0]


def channel_layer_normal_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    **options: Unpack[NormalityOptions],
) -> Tensor:
    """Layer normality normalization of channels-first maps: a set is each position of (N, C, *) over C.

    Takes what `layer_normal_norm` does, with `weight` and `bias` of shape (C,); keeps the memory format.
    """
    sets, dim = channel_sets(x)
    gamma, beta = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    return normality_norm(sets, gamma, beta, dim=dim, eps=eps, **options)[0]


def group_normal_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **options: Unpack[NormalityOptions],
) -> Tensor:
    """Group normality normalization: a set is each sample and group of channels over (C / num_groups, *).

    Takes what `layer_normal_norm` does, for `x` of shape (N, C, *) and `weight` and `bias` of shape (C,). At strength
    0 the function is `torch.nn.functional.group_norm`.

    Raises:
        RuntimeError: If the channels do not divide into the groups.
        ValueError: If sets hold a single value.
    """
    if x.ndim < 2 or x.shape[1] % num_groups:
        raise RuntimeError(f"expected input (N, C, *) with C divisible by num_groups={num_groups}, got {list(x.shape)}")
    if x.numel() == num_groups and x.shape[0] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    last = memory_format_of(x)
    if last != torch.contiguous_format and kernels.fits(x) and kernels.moves(x, x.shape[1] // num_groups):
        # Sets in channels_last are stretches of a group's channels.
        out = group_normal_norm(x.contiguous(), num_groups, weight, bias, eps, **options)
        return out.contiguous(memory_format=last)
    sets, dim = group_sets(num_groups, x)
    affines = (_per_channel(parameter, x.ndim) for parameter in (weight, bias))
    gamma, beta = (None if p is None else p.unflatten(1, (num_groups, -1)) for p in affines)
    return normality_norm(sets, gamma, beta, dim=dim, eps=eps, **options)[0].flatten(1, 2)


def instance_normal_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    running_lambda: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    **options: Unpack[NormalityOptions],
) -> Tensor:
    """Instance normality normalization: a set is each sample and channel over (*).

    Takes what `batch_normal_norm` does; `use_input_stats` chooses the sample's statistics over the running ones, which
    are updated, where given, with the mean over the batch of the samples' statistics. At strength 0 the function is
    `torch.nn.functional.instance_norm`.

    Raises:
        ValueError: If a sample has a single spatial element, or statistics are missing.
    """
    running = running_mean, running_var, running_lambda
    if not use_input_stats:
        return batch_normal_norm(x, *running, weight, bias, False, momentum, eps, **options)
    if math.prod(x.shape[2:]) == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.size()}")
    sets, dim = trailing_sets(x.ndim - 2, x)
    gamma, beta = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    out, statistics = normality_norm(sets, gamma, beta, dim=dim, eps=eps, **options)
    if statistics is not None:
        mean, var, lmbda = (s.mean(0) for s in statistics[:3])
        update_running(*running, Statistics(mean, var, lmbda, statistics.size), momentum)
    return out


def _per_channel(parameter: Tensor | None, ndim: int) -> Tensor | None:
    return None if parameter is None else parameter.view(1, -1, *(1,) * (ndim - 2))


def memory_format_of(x: Tensor) -> torch.memory_format:
    """Return channels_last where that is how `x` lies, and not otherwise contiguous."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


@torch.no_grad()
def update_running(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    running_lambda: Tensor | None,
    statistics: Statistics | None,
    momentum: float | Tensor,
) -> None:
    """Move the running statistics, as far as there are any, towards a batch's, of which an empty one has none."""
    if statistics is None:
        return
    size = statistics.size.to(torch.float32) if isinstance(statistics.size, Tensor) else statistics.size
    var = statistics.var * (size / (size - 1))  # unbiased
    for running, new in ((running_mean, statistics.mean), (running_var, var), (running_lambda, statistics.lmbda)):
        if running is not None:
            running.mul_(1 - momentum).add_(new.reshape(running.shape).to(running.dtype) * momentum)
