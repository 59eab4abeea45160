"""The lambda estimates of a network's normality-normalized layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers import GroupNormalNorm, LayerNormalNorm, LayerNormalNorm2d, NormalityMixin
from retrofit.layers.batch_norm import _BatchNormalNorm
from retrofit.layers.lambda_estimate import newton_lmbda
from retrofit.utils.hooks import hooked


def lambda_values(model: nn.Module, images: Tensor | None = None) -> dict[str, Tensor]:
    """Collect the lambda estimates of each normality-normalized layer, whatever its strength.

    Args:
        model: A network in evaluation.
        images: A batch, (N, C, H, W), for the layers that estimate lambda from each sample; those that keep a running
            average need none.

    Returns:
        By layer name, in the order of registration, one value for each normalized set.
    """
    values: dict[str, Tensor] = {}
    estimating: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, NormalityMixin):
            continue
        running = getattr(module, "running_lambda", None)
        if running is not None:
            values[name] = running.detach().float().cpu()
        elif images is not None:
            values[name] = torch.empty(0, dtype=torch.float32, device="cpu")
            estimating[name] = module

    def look(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values[name] = torch.cat([values[name], _estimates(module, inputs[0].float()).flatten().cpu()])

    if estimating and images is not None:
        watched = hooked(layer.register_forward_pre_hook(partial(look, name)) for name, layer in estimating.items())
        with watched, torch.no_grad():
            model(images)
    return {name: found for name, found in values.items() if found.numel()}


def _estimates(layer: Any, x: Tensor) -> Tensor:
    """Return the lambda that a layer estimates for each normalized set of its input."""
    if isinstance(layer, GroupNormalNorm):
        x = x.unflatten(1, (layer.num_groups, -1))
        dim = tuple(range(2, x.ndim))
    elif isinstance(layer, LayerNormalNorm2d):
        dim = (1,)
    elif isinstance(layer, LayerNormalNorm):
        dim = tuple(range(x.ndim - len(layer.normalized_shape), x.ndim))
    else:
        dim = (*((0,) if isinstance(layer, _BatchNormalNorm) else ()), *range(2, x.ndim))
    var, mean = torch.var_mean(x, dim, correction=0, keepdim=True)
    return newton_lmbda((x - mean) * torch.rsqrt(var + layer.eps), dim, layer.steps)
