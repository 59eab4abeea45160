"""How many groups a layer gets: as many as asked for, or the most that leave its output as it was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.conversion_options import ConversionOptions
from retrofit.errors import RetrofitError, UsageError
from retrofit.layers.decorrelated_batch_norm import largest_divisor
from retrofit.layers.migrated_group_norm import group_gain, migrated_group_norm, settled_eps
from retrofit.surgery.families import NormLayer
from retrofit.utils.running import evaluating, hooked, images_of

GROUP_TOLERANCE = 0.08  # largest relative change of a layer's output that `most_groups` accepts
MOST_GROUPS = 32


def group_count(name: str, channels: int, options: ConversionOptions, default: int) -> tuple[int, str]:
    """Return how many groups a layer gets: by `group_channels`, or at most `groups`, or `default`; and a remark."""
    if (each := options.group_channels) is not None:
        if channels % each:
            raise UsageError(
                f"`group_channels={each}` does not divide the {channels} channels of {name or 'the layer'}; "
                "name a divisor, or leave the layer out with `skip`"
            )
        return channels // each, ""
    most = options.groups if isinstance(options.groups, int) else default
    groups = largest_divisor(channels, most)
    return groups, "" if groups == most else f"{groups} groups: {most} do not divide {channels} channels"


def most_groups(model: nn.Module, norms: Sequence[NormLayer], batches: Iterable[Any]) -> dict[str, tuple[int, float]]:
    """Pick, for each BatchNorm, the most groups whose normalization keeps its output within `GROUP_TOLERANCE`.

    The change is that from the layer in evaluation to the migrated one at strength 1: root mean square over images,
    positions and channels, relative to the output's own about beta. Returned are, by name, the number of groups (1 if
    none keeps within the tolerance) and the change. A RetrofitError says that there are no images, or that a layer is
    never called.
    """
    if not norms:
        return {}
    changes: dict[str, dict[int, Tensor]] = {norm.name: {} for norm in norms}
    watched = hooked(
        norm.module.register_forward_pre_hook(partial(_measure, norm.layer, changes[norm.name])) for norm in norms
    )
    images = 0
    with evaluating(model), watched:
        for batch in images_of(batches):
            model(batch)
            images += len(batch)
    if not images:
        raise RetrofitError("there are no images to pick groups by; give `calibrate` some")
    picked = {}
    for name, by_groups in changes.items():
        if not by_groups:
            raise RetrofitError(f"the model never calls {name}, so its groups cannot be picked; give `groups` a number")
        relative = {n: float((change / power.clamp_min(1e-30)).sqrt()) for n, (change, power) in by_groups.items()}
        groups = max((n for n, error in relative.items() if error <= GROUP_TOLERANCE), default=1)
        picked[name] = groups, relative[groups]
    return picked


def _measure(norm: Any, changes: dict[int, Tensor], _: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Add to `changes[groups]`, (2,), the squared change and the power of the output, for every number of groups."""
    (x,) = args
    statistics = norm.running_mean, norm.running_var
    kept = functional.batch_norm(x, *statistics, norm.weight, eps=norm.eps)
    for groups in range(1, min(x.shape[1], MOST_GROUPS) + 1):
        if x.shape[1] % groups:
            continue
        eps = settled_eps(norm.weight, norm.running_var, norm.eps, groups)
        gain = group_gain(norm.weight, groups)
        new = migrated_group_norm(x, groups, *statistics, norm.weight, eps=eps, source_eps=norm.eps, gain=gain)
        total = torch.stack([(new - kept).double().square().sum(), kept.double().square().sum()])
        changes[groups] = changes.get(groups, 0) + total
