"""How many groups a layer gets: as many as asked for, or the most that leave its output as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.decorrelated_batch_norm import largest_divisor
from retrofit.layers.migrated_group_norm import group_gain
from retrofit.surgery.families import NormLayer
from retrofit.utils.batches import images_of
from retrofit.utils.evaluating import evaluating
from retrofit.utils.hooks import hooked

GROUP_TOLERANCE = 0.08
"""Largest relative change of a layer's output that `most_groups` accepts."""
MOST_GROUPS = 32


def group_count(name: str, channels: int, options: ConversionOptions, default: int) -> tuple[int, str]:
    """Return how many groups a layer gets by the options, and what is to be said of it.

    Args:
        name: The layer's.
        channels: Of the layer.
        options: Their `group_channels`, or their `groups` as the most there may be.
        default: The most groups if the options name none.

    Raises:
        UsageError: If `group_channels` does not divide the channels.
    """
    if (each := options.group_channels) is not None:
        if channels % each:
            raise UsageError(
                f"`group_channels={each}` does not divide the {channels} channels of {name or 'the layer'}; "
                "name a divisor, or leave the layer out with `skip`"
            )
        return channels // each, ""
    wanted = options.groups if isinstance(options.groups, int) else default
    groups = largest_divisor(channels, wanted)
    return groups, "" if groups == wanted else f"{groups} groups: {wanted} do not divide {channels} channels"


def most_groups(model: nn.Module, norms: Sequence[NormLayer], batches: Iterable[Any]) -> dict[str, tuple[int, float]]:
    """Pick, for each BatchNorm, the most groups whose normalization keeps its output within `GROUP_TOLERANCE`.

    The change is that from the layer in evaluation to group normalization of the input as standardised by the running
    statistics: root mean square over images, positions and channels, relative to the output's own about beta. It is
    computed from the moments of each image and channel, so nothing is stored.

    Args:
        model: The source network; its mode is restored.
        norms: The BatchNorms, with running statistics.
        batches: Images, (N, C, H, W) each, preprocessed for the model; with labels, as a loader gives them, or without.

    Returns:
        For each name the number of groups (1 if no number keeps within the tolerance) and the relative change.

    Raises:
        RetrofitError: If there are no images, or a layer is never called.
    """
    changes: dict[str, dict[int, list[float]]] = {norm.name: {} for norm in norms}
    watched = hooked(
        norm.module.register_forward_pre_hook(partial(_measure, norm.layer, changes[norm.name])) for norm in norms
    )
    seen = 0
    with evaluating(model), watched:
        for batch in images_of(batches):
            model(batch)
            seen += len(batch)
    if not seen:
        raise RetrofitError("there are no images to pick groups by; give `calibrate` some")
    picked = {}
    for name, by_groups in changes.items():
        if not by_groups:
            raise RetrofitError(f"the model never calls {name}, so its groups cannot be picked; give `groups` a number")
        relative = {n: (change / max(power, 1e-30)) ** 0.5 for n, (change, power) in by_groups.items()}
        groups = max((n for n, error in relative.items() if error <= GROUP_TOLERANCE), default=1)
        picked[name] = groups, relative[groups]
    return picked


def _measure(norm: Any, changes: dict[int, list[float]], _: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Add to `changes[groups]` the squared change and the power of the output, for every number of groups."""
    (x,) = args
    x = x.flatten(2).double() if x.ndim > 2 else x.unsqueeze(2).double()
    var, mean = torch.var_mean(x, 2, correction=0)
    rstd = torch.rsqrt(norm.running_var.double() + norm.eps)
    mean, var = (mean - norm.running_mean.double()) * rstd, var * rstd.square()
    gamma2 = 1.0 if norm.weight is None else norm.weight.double().square()
    second = var + mean.square()
    power = float((gamma2 * second).sum())
    n, channels = mean.shape
    for groups in range(1, min(channels, MOST_GROUPS) + 1):
        if channels % groups:
            continue
        shape = n, groups, channels // groups
        gain = group_gain(norm.weight, groups)
        a = torch.ones_like(rstd) if gain is None else gain.double()
        m = (a * mean).view(shape).mean(2, keepdim=True)
        v = (a.square() * second).view(shape).mean(2, keepdim=True) - m.square()
        eps = (a.square() * (norm.eps * rstd.square())).mean()
        k = torch.rsqrt(v + eps).expand(shape).reshape(n, channels)
        m = m.expand(shape).reshape(n, channels) / a
        # E[(k * (x' - m) - x')^2] per image and channel
        change = (k - 1).square() * second - 2 * (k - 1) * k * m * mean + k.square() * m.square()
        total = changes.setdefault(groups, [0.0, 0.0])
        total[0] += float((gamma2 * change).sum())
        total[1] += power
