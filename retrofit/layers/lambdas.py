"""The lambda estimates of a network's normality-normalized layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from retrofit.layers.base import NormalityMixin
from retrofit.layers.normality_norm import estimate
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
    estimating: dict[str, NormalityMixin] = {}
    for name, module in model.named_modules():
        if not isinstance(module, NormalityMixin):
            continue
        running = getattr(module, "running_lambda", None)
        if running is not None:
            values[name] = running.detach().float().cpu()
        elif images is not None:
            values[name] = torch.empty(0, dtype=torch.float32, device="cpu")
            estimating[name] = module

    def collect(name: str, layer: NormalityMixin, inputs: tuple[Tensor, ...]) -> None:
        values[name] = torch.cat([values[name], _estimates(layer, inputs[0].float()).flatten().cpu()])

    if estimating and images is not None:
        watched = hooked(layer.register_forward_pre_hook(partial(collect, name)) for name, layer in estimating.items())
        with watched, torch.no_grad():
            model(images)
    return {name: lmbda for name, lmbda in values.items() if lmbda.numel()}


def _estimates(layer: NormalityMixin, x: Tensor) -> Tensor:
    """Return the lambda that a layer estimates for each normalized set of its input."""
    values, dim = layer.normalized_sets(x)
    var, mean = torch.var_mean(values, dim, correction=0, keepdim=True)
    return estimate((values - mean) * torch.rsqrt(var + vars(layer)["eps"]), dim)
