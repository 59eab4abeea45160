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
    layers = {name: module for name, module in model.named_modules() if isinstance(module, NormalityMixin)}
    values: dict[str, list[Tensor]] = {name: [] for name in layers}

    def collect(name: str, layer: NormalityMixin, inputs: tuple[Tensor, ...]) -> None:
        sets, dim = layer.normalized_sets(inputs[0].float())
        var, mean = torch.var_mean(sets, dim, correction=0, keepdim=True)
        lmbda = estimate((sets - mean) * torch.rsqrt(var + vars(layer)["eps"]), dim)
        values[name].append(lmbda.flatten().cpu())

    estimating = {}
    for name, layer in layers.items():
        if (running := getattr(layer, "running_lambda", None)) is not None:
            values[name] = [running.detach().float().cpu()]
        else:
            estimating[name] = layer
    if estimating and images is not None:
        watched = hooked(layer.register_forward_pre_hook(partial(collect, name)) for name, layer in estimating.items())
        with watched, torch.no_grad():
            model(images)
    return {name: torch.cat(found) for name, found in values.items() if found}
