"""A normalization layer on its own: what it makes of an input before the transform, after it, and after its affine.

A probe computes from the layer's parameters without its hooks, its dropout or its fused activation; the layer itself
is not touched, and no running statistic moves.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from retrofit.layers import MigratedGroupNorm, NormalityMixin, ProxyNorm
from retrofit.layers.base import strength_code
from retrofit.surgery.families import find_norms

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


class Probe:
    """One normalization layer; its tensors are read when they are needed, so that it stays valid while they change."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        self.name, self.layer, self.kind = name, layer, type(layer).__name__
        self._bare: Any = copy.copy(layer)
        self._bare._modules = {
            key: nn.Identity() if key in ("drop", "act") else child for key, child in layer._modules.items()
        }
        for hooks in _HOOKS:
            setattr(self._bare, hooks, OrderedDict())
        self._bare.training = False
        self.transforms = isinstance(layer, NormalityMixin)  # whether it applies the power transform

    def normalized(self, x: Tensor, transformed: bool = True) -> Tensor:
        """Return what the affine gets, the transform included unless not `transformed`, as (N, C, positions)."""
        neutral = self._neutral()
        running = getattr(self.layer, "running_lambda", None)
        if not transformed and isinstance(running, Tensor):  # strength 0 would undo whitening too
            neutral["running_lambda"] = torch.ones_like(running)
        elif not transformed and self.transforms:
            neutral["strength"] = strength_code(0.0, x.device)
        return self.by_channel(functional_call(self._bare, neutral, (x,)))

    def output(self, x: Tensor) -> Tensor:
        """Return what follows the affine, in `x`'s shape."""
        out: Tensor = self._bare(x)
        return out

    def channel_axis(self, y: Tensor) -> int:
        """Return which dimension of an output holds the channels."""
        if y.ndim > 2 and isinstance(self.layer, nn.LayerNorm) and "2d" not in self.kind:
            return y.ndim - len(self.layer.normalized_shape)
        return 1

    def by_channel(self, y: Tensor) -> Tensor:
        """View an output as (N, C, positions), float32."""
        y = y.movedim(self.channel_axis(y), 1)
        return y.reshape(*y.shape[:2], -1).float()

    def _neutral(self) -> dict[str, Tensor]:
        """The affine parameters that leave the normalized values as they are."""
        neutral: dict[str, Tensor] = {}
        weight, bias = (getattr(self.layer, key, None) for key in ("weight", "bias"))
        if isinstance(weight, Tensor):
            gain = getattr(self.layer, "gain", None) if isinstance(self.layer, MigratedGroupNorm) else None
            neutral["weight"] = torch.ones_like(weight) if gain is None else gain.to(weight)
        if isinstance(bias, Tensor):
            neutral["bias"] = torch.zeros_like(bias)
        return neutral


def probes(model: nn.Module) -> tuple[list[Probe], list[str]]:
    """Return a probe for every normalization layer that standardises, and the names of those that do not, or do more.

    Each module has one probe; both lists are in the model's order.
    """
    found: dict[nn.Module, Probe] = {}
    others = []
    for norm in find_norms(model):
        if norm.family is None and norm.status != "kept":
            others.append(norm.name)
        elif norm.module not in found and not isinstance(norm.module, ProxyNorm):
            found[norm.module] = Probe(norm.name, norm.module)
    return list(found.values()), others
