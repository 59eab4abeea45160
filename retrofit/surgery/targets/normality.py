"""Targets bnn, lnn, gnn, inn and normal: each normalization layer to its normality-normalized counterpart.

Strength 0 is the source layer, so that the network computes the same function, in training too, until its strength
is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from retrofit import layers
from retrofit.conversion_options import ConversionOptions
from retrofit.surgery.converter import Converter, Decision, Decisions, adopt, materialize_at_zero, register
from retrofit.surgery.families import FAMILIES, KNOWN, NormLayer
from retrofit.surgery.plan_and_report import LayerRow

_COUNTERPARTS: dict[str, type[nn.Module]] = {
    "BatchNorm1d": layers.BatchNormalNorm1d,
    "BatchNorm2d": layers.BatchNormalNorm2d,
    "BatchNorm3d": layers.BatchNormalNorm3d,
    "SyncBatchNorm": layers.SyncBatchNormalNorm,
    "BatchNormAct2d": layers.BatchNormalNormAct2d,
    "SyncBatchNormAct": layers.SyncBatchNormalNormAct,
    "LayerNorm": layers.LayerNormalNorm,
    "LayerNormFp32": layers.LayerNormalNorm,
    "LayerNormNoBias": layers.LayerNormalNorm,
    "LayerNorm2d": layers.LayerNormalNorm2d,
    "LayerNorm2dFp32": layers.LayerNormalNorm2d,
    "LayerNormExp2d": layers.LayerNormalNorm2d,
    "LayerNorm2dNoBias": layers.LayerNormalNorm2d,
    "LayerNormAct": layers.LayerNormalNormAct,
    "LayerNormActFp32": layers.LayerNormalNormAct,
    "LayerNormAct2d": layers.LayerNormalNormAct2d,
    "LayerNormAct2dFp32": layers.LayerNormalNormAct2d,
    "GroupNorm": layers.GroupNormalNorm,
    "GroupNorm1": layers.GroupNormalNorm,
    "GroupNorm1NoBias": layers.GroupNormalNorm,
    "GroupNormAct": layers.GroupNormalNormAct,
    "GroupNorm1Act": layers.GroupNormalNormAct,
    "InstanceNorm1d": layers.InstanceNormalNorm1d,
    "InstanceNorm2d": layers.InstanceNormalNorm2d,
    "InstanceNorm3d": layers.InstanceNormalNorm3d,
}
_BY_KIND = {kind: _COUNTERPARTS[kind.rpartition(".")[2]] for kind, family in KNOWN.items() if family != "frozen-bn"}
_BY_NAME = {cls.__name__: cls for cls in _COUNTERPARTS.values()}


class NormalityConverter(Converter):
    """Swaps norm for norm: the source's tensors, a running lambda of 1 where statistics are tracked, strength 0.

    Args:
        family: The only family the target stands for, or None for each to its own.
    """

    def __init__(self, family: str | None = None) -> None:
        self.family = family
        self.sources = frozenset(FAMILIES) - {"frozen-bn"} if family is None else frozenset({family})

    def plan(self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions) -> Decisions:
        """Convert every known layer of the target's own family."""
        return Decisions({layer.name: self._decide(layer, options) for layer in layers})

    def build(self, module: nn.Module, row: LayerRow, device: torch.device) -> nn.Module:
        """Build the counterpart on the meta device and move the source's tensors in."""
        cls = _BY_NAME[str(row.target)]
        new = cls(*arguments(module), **affine_arguments(module), **row.options, device="meta", strength=0.0)
        adopt(new, module)
        materialize_at_zero(new, device)
        mean = getattr(module, "running_mean", None)
        if mean is not None:
            new.register_buffer("running_lambda", torch.ones_like(mean))
        return new

    def _decide(self, found: NormLayer, options: ConversionOptions) -> Decision:
        target = _BY_KIND.get(found.kind)
        if target is None or (self.family is not None and found.family != self.family):
            other = FAMILIES[str(found.family)]
            own = "its normality counterpart" if self.family is None else f"{FAMILIES[self.family]}; use `to='normal'`"
            return Decision("unsupported", reason=f"{other} has no function-preserving path to {own}")
        return Decision("converted", target=target.__name__, options=layer_options(options))


def layer_options(options: ConversionOptions) -> dict[str, Any]:
    """Return the constructor options of a normality-normalized layer: those that are asked for, and the noise."""
    noise = 0.0 if options.noise is None else options.noise
    asked = {
        "noise": None if noise == "paper" else float(noise),  # the layers' default is the paper's
        "noise_kind": options.noise_kind,
        "alpha": options.alpha,
    }
    return {name: value for name, value in asked.items() if value is not None}


def arguments(module: Any) -> tuple[Any, ...]:
    """Return the positional arguments that a counterpart of `module` is built with."""
    if isinstance(module, nn.LayerNorm):
        return (module.normalized_shape, module.eps)
    if isinstance(module, nn.GroupNorm):
        return (module.num_groups, module.num_channels, module.eps)
    return (module.num_features, module.eps, module.momentum)


def affine_arguments(module: Any) -> dict[str, Any]:
    """Return what a counterpart of `module` has of affine parameters, statistics and processes, as arguments."""
    given: dict[str, Any] = {"bias": module.bias is not None}
    given["elementwise_affine" if isinstance(module, nn.LayerNorm) else "affine"] = module.weight is not None
    if isinstance(module, nn.modules.batchnorm._NormBase):
        given["track_running_stats"] = module.track_running_stats
    if isinstance(module, nn.SyncBatchNorm):
        given["process_group"] = module.process_group
    return given


register("bnn", "BatchNorm to batch normality normalization", NormalityConverter, family="bn")
register("lnn", "LayerNorm to layer normality normalization", NormalityConverter, family="ln")
register("gnn", "GroupNorm to group normality normalization", NormalityConverter, family="gn")
register("inn", "InstanceNorm to instance normality normalization", NormalityConverter, family="in")
register("normal", "every norm to its own normality-normalized counterpart", NormalityConverter)
