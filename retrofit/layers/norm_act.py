"""Normality-normalized and decorrelated layers that carry the dropout and activation of timm's fused norm+act layers.

The fused children keep their names, `drop` and `act`, and their order: norm, drop, activation.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from retrofit.layers.batch_norm import BatchNormalNorm2d, SyncBatchNormalNorm
from retrofit.layers.converted_layer import ConvertedLayer
from retrofit.layers.decorrelated_batch_norm import DecorrelatedBatchNorm2d, DecorrelatedBatchNormalNorm2d
from retrofit.layers.group_norm import GroupNormalNorm
from retrofit.layers.layer_norm import LayerNormalNorm, LayerNormalNorm2d


class _ThenActivate(ConvertedLayer):
    """Mixin: the layer's own forward, then `drop`, then `act`; both are the identity until assigned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drop: nn.Module = nn.Identity()
        self.act: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, then apply `drop` and `act`."""
        out: Tensor = self.act(self.drop(super().forward(x)))
        return out

    def fused_modules(self) -> list[nn.Module]:
        """Return `drop` and `act`, as far as they do something."""
        return [module for module in (self.drop, self.act) if type(module) is not nn.Identity]


class BatchNormalNormAct2d(_ThenActivate, BatchNormalNorm2d):
    """Batch normality normalization, then `drop` and `act`: the counterpart of timm's BatchNormAct2d."""

    fused_source_name: ClassVar[str] = "BatchNormAct2d"


class SyncBatchNormalNormAct(_ThenActivate, SyncBatchNormalNorm):
    """Synchronized batch normality normalization, then `drop` and `act`: the counterpart of timm's SyncBatchNormAct."""

    fused_source_name: ClassVar[str] = "SyncBatchNormAct"


class DecorrelatedBatchNormAct2d(_ThenActivate, DecorrelatedBatchNorm2d):
    """Decorrelated batch normalization, then `drop` and `act`: another counterpart of timm's BatchNormAct2d."""

    fused_source_name: ClassVar[str] = "BatchNormAct2d"


class DecorrelatedBatchNormalNormAct2d(_ThenActivate, DecorrelatedBatchNormalNorm2d):
    """Decorrelated batch normality normalization, then `drop` and `act`."""

    fused_source_name: ClassVar[str] = "BatchNormAct2d"


class GroupNormalNormAct(_ThenActivate, GroupNormalNorm):
    """Group normality normalization, then `drop` and `act`: the counterpart of timm's GroupNormAct."""

    fused_source_name: ClassVar[str] = "GroupNormAct"

    def _build_source(self, cls: Any) -> nn.Module:
        if cls is nn.GroupNorm:
            return super()._build_source(cls)
        new: nn.Module = cls(self.num_channels, self.num_groups, self.eps, device="meta")  # timm's order
        return new


class LayerNormalNormAct(_ThenActivate, LayerNormalNorm):
    """Layer normality normalization, then `drop` and `act`: the counterpart of timm's LayerNormAct."""

    fused_source_name: ClassVar[str] = "LayerNormAct"


class LayerNormalNormAct2d(_ThenActivate, LayerNormalNorm2d):
    """Channels-first layer normality normalization, then `drop` and `act`: the counterpart of timm's LayerNormAct2d."""

    fused_source_name: ClassVar[str] = "LayerNormAct2d"
