"""The lambda estimates of a network's normality-normalized layers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from retrofit.layers.base import NormalityMixin
from retrofit.layers.normality_norm import estimate
from retrofit.utils.running import hooked


def lambda_values(model: nn.Module, images: Tensor | None = None) -> dict[str, Tensor]:
    """Return the lambda estimates of each normality-normalized layer of a network in evaluation, whatever its strength.

    By layer name, in the order of registration, one value a normalized set: the running average where the layer keeps
    one, else the estimates on `images`, (N, C, H, W). Without images the layers that need them are left out.
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
