"""Target frozen: BatchNorm to the constant affine map that its running statistics make of it, gamma and beta trained.

The network is its source in evaluation, in training too, and stays batch-independent. There is one function, so there
is no strength. Networks whose BatchNorm is frozen already, torchvision's detectors for one, get their gamma and beta
back as parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.layers import FrozenBatchNorm, FrozenBatchNormAct
from retrofit.surgery.converter import (
    Converter,
    Decision,
    Decisions,
    adopt,
    count_batches,
    register,
)
from retrofit.surgery.families import FAMILIES, NormLayer
from retrofit.surgery.plan_and_report import LayerRow


class FrozenConverter(Converter):
    """BatchNorm, synchronized or frozen, to `FrozenBatchNorm`."""

    sources = frozenset({"bn", "frozen-bn"})
    has_strength = False

    def plan(self, model: nn.Module, layers: Sequence[NormLayer], options: ConversionOptions) -> Decisions:
        """Convert every BatchNorm that has running statistics."""
        return Decisions({layer.name: self._decide(layer) for layer in layers})

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        """Build the frozen layer around the source's tensors."""
        cls = FrozenBatchNormAct if row.target == FrozenBatchNormAct.__name__ else FrozenBatchNorm
        affine, bias = module.weight is not None, module.bias is not None
        new = adopt(cls(module.running_mean.numel(), module.eps, affine, "meta", bias=bias), module)
        count_batches(new, device)
        return new

    def _decide(self, found: NormLayer) -> Decision:
        if found.family not in self.sources:
            family = FAMILIES[str(found.family)]
            return Decision("unsupported", reason=f"{family} is batch-independent already: it has nothing to freeze")
        if isinstance(found.layer, FrozenBatchNorm):
            return Decision("kept", reason="already converted")
        if getattr(found.layer, "running_mean", None) is None:
            return Decision("unsupported", reason="it tracks no running statistics, so there is nothing to freeze")
        target = FrozenBatchNormAct if hasattr(found.layer, "act") else FrozenBatchNorm
        return Decision("converted", target.__name__)


register("frozen", "BatchNorm to the constant affine of its running statistics", FrozenConverter)
