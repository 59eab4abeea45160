"""Target frozen: BatchNorm to the constant affine map that its running statistics make of it, gamma
and beta trained.

The network is its source in evaluation, in training too, and stays batch-independent. There is one
function, so there is no strength. Networks whose BatchNorm is frozen already, torchvision's
detectors for one, get their gamma and beta back as parameters.
"""

from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.layers import FrozenBatchNorm
from retrofit.registry import layer_named
from retrofit.surgery.converter import Converter, adopt
from retrofit.surgery.norm_layers import NormLayer
from retrofit.surgery.plan_and_report import LayerRow


class FrozenConverter(Converter):
    """BatchNorm, synchronized or frozen, to `FrozenBatchNorm`."""

    has_strength = False

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        if isinstance(layer.layer, FrozenBatchNorm):
            return layer.row("kept", "already converted")
        if getattr(layer.layer, "running_mean", None) is None:
            return layer.row(
                "unsupported", "it tracks no running statistics, so there is nothing to freeze"
            )
        target = "FrozenBatchNorm"
        if hasattr(layer.layer, "act"):
            target = "FrozenBatchNormAct"
        return layer.row("converted", target=target)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        cls: Any = layer_named(str(row.target))
        new: nn.Module = adopt(cls(module.running_mean.numel(), device=device), module)
        return new


FROZEN = FrozenConverter()
