"""The functional forms of the normality-normalized layers, each beside torch's own in its arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from retrofit.layers import kernels
from retrofit.layers.normality_norm import NormalityOptions, Statistics, apply_statistics, normality_norm
from retrofit.layers.sets import batch_sets, channel_sets, group_sets, instance_sets, trailing_sets
from retrofit.layers.transforms import transformed


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
    if not training:
        if running_mean is None or running_var is None or running_lambda is None:
            raise ValueError("running statistics are needed outside training")
        lmbda = 1 + options.get("strength", 1.0) * options.get("alpha", 1.0) * (running_lambda - 1)
        if _is_identity(lmbda):
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)
        mean, var, lmbda = (_view(s, x.ndim) for s in (running_mean, running_var, lmbda))
        return apply_statistics(x, mean, var, lmbda, gamma, beta, eps)
    if x.numel() == 0 and group is None:
        return _empty(x, gamma, beta)
    sets, dim = batch_sets(x)
    out, statistics = normality_norm(sets, gamma, beta, dim=dim, eps=eps, group=group, **options)
    _update_running(running_mean, running_var, running_lambda, statistics, momentum)
    return out


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
        raise RuntimeError(
            f"Given normalized_shape={list(shape)}, expected input with shape [*, {', '.join(map(str, shape))}], "
            f"but got input of size{list(x.shape)}"
        )
    if x.numel() == 0:
        return _empty(x, weight, bias)
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
    gamma, beta = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    if x.numel() == 0:
        return _empty(x, gamma, beta)
    sets, dim = channel_sets(x)
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
        ValueError: If the channels do not divide into the groups, or sets hold a single value.
    """
    if x.ndim < 2:
        raise RuntimeError(f"Expected at least 2 dimensions for input tensor but received {x.ndim}")
    channels = x.shape[1]
    if channels % num_groups:
        raise RuntimeError(
            f"Expected number of channels in input to be divisible by num_groups, but got input of shape "
            f"{list(x.shape)} and num_groups={num_groups}"
        )
    if x.numel() == num_groups and x.shape[0] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    if x.numel() == 0:
        return _empty(x, _per_channel(weight, x.ndim), _per_channel(bias, x.ndim))
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    apart = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    if last and apart and kernels.fits(x) and kernels.moves(x, channels // num_groups):
        # Sets in channels_last are stretches of a group's channels.
        out = group_normal_norm(x.contiguous(), num_groups, weight, bias, eps, **options)
        return out.contiguous(memory_format=last)
    sets, dim = group_sets(num_groups, x)
    gamma, beta = (None if p is None else group_sets(num_groups, _view(p, x.ndim))[0] for p in (weight, bias))
    out, _ = normality_norm(sets, gamma, beta, dim=dim, eps=eps, **options)
    return out.flatten(1, 2)


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
    if not use_input_stats:
        return batch_normal_norm(
            x, running_mean, running_var, running_lambda, weight, bias, False, momentum, eps, **options
        )
    if math.prod(x.shape[2:]) == 1:
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {x.size()}")
    gamma, beta = _per_channel(weight, x.ndim), _per_channel(bias, x.ndim)
    if x.numel() == 0:
        return _empty(x, gamma, beta)
    sets, dim = instance_sets(x)
    out, statistics = normality_norm(sets, gamma, beta, dim=dim, eps=eps, **options)
    mean, var, lmbda = (s.mean(0) for s in statistics[:3])
    _update_running(running_mean, running_var, running_lambda, Statistics(mean, var, lmbda, statistics.size), momentum)
    return out


def _is_identity(lmbda: Tensor) -> bool:
    """Whether every channel's transform is the identity, so that torch's own layer answers, bit for bit.

    A compiler or a transform cannot branch on values, and a GPU would have to be waited for: there the power transform
    is computed, and the identity to rounding.
    """
    return not (torch.compiler.is_compiling() or transformed()) and lmbda.is_cpu and bool((lmbda == 1).all())


def _view(stat: Tensor, ndim: int) -> Tensor:
    return stat.view(1, -1, *(1,) * (ndim - 2))


def _per_channel(parameter: Tensor | None, ndim: int) -> Tensor | None:
    return None if parameter is None else _view(parameter, ndim)


def _empty(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """An empty result that is still connected to the parameters, whose gradients are then zero, as torch's are."""
    out = x * 1.0 if weight is None else x * weight
    return (out if bias is None else out + bias).to(x.dtype)


@torch.no_grad()
def _update_running(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    running_lambda: Tensor | None,
    statistics: Statistics,
    momentum: float | Tensor,
) -> None:
    size = statistics.size.to(torch.float32) if isinstance(statistics.size, Tensor) else statistics.size
    var = statistics.var * (size / (size - 1))  # unbiased
    for running, new in ((running_mean, statistics.mean), (running_var, var), (running_lambda, statistics.lmbda)):
        if running is not None:
            running.mul_(1 - momentum).add_(new.reshape(running.shape).to(running.dtype) * momentum)
