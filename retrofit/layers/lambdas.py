"""The lambda estimates of a network's normality-normalized layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from retrofit.layers import GroupNormalNorm, LayerNormalNorm, LayerNormalNorm2d, NormalityMixin
from retrofit.layers.batch_norm import _BatchNormalNorm
from retrofit.layers.lambda_estimate import newton_lmbda


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
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, NormalityMixin):
            continue
        running = getattr(module, "running_lambda", None)
        if running is not None:
            values[name] = running.detach().float().cpu()
        elif images is not None:
            values[name] = torch.empty(0, dtype=torch.float32, device="cpu")
            hooks.append(module.register_forward_pre_hook(_measure(values, name)))
    if hooks and images is not None:
        try:
            with torch.no_grad():
                model(images)
        finally:
            for hook in hooks:
                hook.remove()
    return {name: found for name, found in values.items() if found.numel()}


def _measure(values: dict[str, Tensor], name: str) -> Any:
    def look(module: Any, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        if isinstance(module, GroupNormalNorm):
            x = x.unflatten(1, (module.num_groups, -1))
            dim = tuple(range(2, x.ndim))
        elif isinstance(module, LayerNormalNorm2d):
            dim = (1,)
        elif isinstance(module, LayerNormalNorm):
            dim = tuple(range(x.ndim - len(module.normalized_shape), x.ndim))
        else:
            dim = (*((0,) if isinstance(module, _BatchNormalNorm) else ()), *range(2, x.ndim))
        var, mean = torch.var_mean(x, dim, correction=0, keepdim=True)
        h = (x - mean) * torch.rsqrt(var + module.eps)
        values[name] = torch.cat([values[name], newton_lmbda(h, dim, module.steps).flatten().cpu()])

    return look
