"""Targets dbn and dbnn: BatchNorm to decorrelated batch normalization, plain and with the power transform.

Strength 0 is the source layer, in training too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from retrofit import layers
from retrofit.conversion_options import ConversionOptions
from retrofit.layers.decorrelated_batch_norm import GROUP_SIZE, DecorrelatedNorm, largest_divisor
from retrofit.surgery.converter import Converter, Decision, Decisions, adopt, materialize_at_zero, register
from retrofit.surgery.families import FAMILIES, NormLayer
from retrofit.surgery.plan_and_report import LayerRow
from retrofit.surgery.targets.normality import affine_arguments, arguments, layer_options

_PLAIN: dict[str, type[DecorrelatedNorm]] = {
    "BatchNorm1d": layers.DecorrelatedBatchNorm1d,
    "BatchNorm2d": layers.DecorrelatedBatchNorm2d,
    "BatchNorm3d": layers.DecorrelatedBatchNorm3d,
    "BatchNormAct2d": layers.DecorrelatedBatchNormAct2d,
}
_NORMAL: dict[str, type[DecorrelatedNorm]] = {
    "BatchNorm1d": layers.DecorrelatedBatchNormalNorm1d,
    "BatchNorm2d": layers.DecorrelatedBatchNormalNorm2d,
    "BatchNorm3d": layers.DecorrelatedBatchNormalNorm3d,
    "BatchNormAct2d": layers.DecorrelatedBatchNormalNormAct2d,
}
_SYNCHRONIZED = "whitening matrices are not synchronized between processes; convert it to BatchNorm first"
_UNTRACKED = "it tracks no running statistics, so there would be no whitening matrix at test time"


class DecorrelatedConverter(Converter):
    """Swaps BatchNorm for its decorrelated form: the source's tensors, its own scaling as whitening, strength 0.

    Args:
        normality: Whether the whitened values are gaussianized.
    """

    sources = frozenset({"bn"})

    def __init__(self, normality: bool) -> None:
        self.normality = normality

    def plan(self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions) -> Decisions:
        """Convert every BatchNorm that has running statistics and keeps them to itself."""
        return Decisions({layer.name: self._decide(layer, options) for layer in layers})

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        """Build the decorrelated layer around the source's tensors."""
        cls: Any = next(cls for cls in (*_PLAIN.values(), *_NORMAL.values()) if cls.__name__ == row.target)
        new = cls(*arguments(module), **affine_arguments(module), **row.options, device="meta", strength=0.0)
        adopt(new, module)
        materialize_at_zero(new, device)
        new.reset_running_whitening()
        if self.normality:
            new.register_buffer("running_lambda", torch.ones_like(module.running_mean))
        return new

    def _decide(self, found: NormLayer, options: ConversionOptions) -> Decision:
        if found.family != "bn":
            family = FAMILIES[str(found.family)]
            return Decision(
                "unsupported", reason=f"{family} has no function-preserving path to whitening over the batch"
            )
        module: Any = found.layer
        target = (_NORMAL if self.normality else _PLAIN).get(found.known_class)
        if target is None:
            return Decision("unsupported", reason=_SYNCHRONIZED)
        if module.running_mean is None:
            return Decision("unsupported", reason=_UNTRACKED)
        settled = layer_options(options) if self.normality else {}
        wanted, channels = options.group_size or GROUP_SIZE, module.num_features
        settled["group_size"] = size = largest_divisor(channels, wanted)
        reason = (
            "" if size == wanted else f"whitened {size} channels at a time: {wanted} do not divide {channels} channels"
        )
        return Decision("converted", target.__name__, reason, settled)


register("dbn", "BatchNorm to decorrelated batch normalization", DecorrelatedConverter, normality=False)
register("dbnn", "BatchNorm to decorrelated batch normality normalization", DecorrelatedConverter, normality=True)
