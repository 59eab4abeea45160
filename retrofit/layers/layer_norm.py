"""LayerNormalNorm and its channels-first form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from retrofit.layers.base import NormalityMixin
from retrofit.layers.converted_layer import _ThenActivate
from retrofit.layers.forms import ChannelsFirstLayerNorm, constants_of
from retrofit.layers.normality_norm import NormalityOptions
from retrofit.layers.normalized_sets import Sets, channel_sets, trailing_sets


class LayerNormalNorm(NormalityMixin, nn.LayerNorm):
    """Layer normality normalization over the trailing `normalized_shape`: `torch.nn.LayerNorm`'s counterpart.

    lambda is estimated from each sample, in training and after (Eftekhari & Papyan 2025, algorithm 1). Takes torch's
    arguments and `noise` (xi, the paper's 1.0), `strength` (t, 1) and `NormalityMixin`'s `noise_kind` and
    `alpha`.
    """

    source_name: ClassVar[str] = "LayerNorm"
    paper_noise: ClassVar[float] = 1.0
    per_channel: ClassVar[bool] = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[NormalityOptions],
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._register_options(device, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (*, *normalized_shape)."""
        shape = self.normalized_shape
        if x.shape[x.ndim - len(shape) :] != shape:
            raise RuntimeError(f"expected input that ends in normalized_shape={list(shape)}, but got {list(x.shape)}")
        return self._by_own_statistics(x)[0]

    def _build_source(self, cls: Any) -> nn.Module:
        shape = self.normalized_shape
        new: nn.Module = cls(shape[0] if self.per_channel else shape, eps=self.eps, device="meta")
        return new

    def channel_dims(self, x: Tensor) -> tuple[int, ...]:
        """Return the dimensions before the normalized ones, or all but the channels'."""
        return super().channel_dims(x) if self.per_channel else tuple(range(x.ndim - len(self.normalized_shape)))

    def _sets(self) -> Sets:
        return partial(trailing_sets, len(self.normalized_shape))


class LayerNormalNorm2d(LayerNormalNorm):
    """Layer normality normalization of channels-first maps, (N, C, *): each position over C.

    The counterpart of timm's and torchvision's LayerNorm2d; keeps the input's memory format. `normalized_shape` is C.
    """

    source_name: ClassVar[str] = "LayerNorm2d"
    per_channel: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (N, C, *), over C."""
        if x.ndim < 2 or x.shape[1] != self.normalized_shape[0]:
            raise RuntimeError(f"expected input of shape (N, {self.normalized_shape[0]}, *), but got {tuple(x.shape)}")
        return self._by_own_statistics(x)[0]

    def _sets(self) -> Sets:
        return channel_sets

    def _source_form(self) -> nn.Module:
        return constants_of(ChannelsFirstLayerNorm(self.normalized_shape, self.eps, device="meta"), self)


class LayerNormalNormAct(_ThenActivate, LayerNormalNorm):
    """Layer normality normalization, then `drop` and `act`: the counterpart of timm's LayerNormAct."""


class LayerNormalNormAct2d(_ThenActivate, LayerNormalNorm2d):
    """Channels-first layer normality normalization, then `drop` and `act`: the counterpart of timm's LayerNormAct2d."""
