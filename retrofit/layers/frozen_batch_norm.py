"""BatchNorm whose statistics no longer move: a constant affine map per channel, with gamma and beta to be trained."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.constant_affine import trained_affine
from retrofit.layers.converted_layer import ConvertedLayer, reset_affine
from retrofit.layers.norm_act import _ThenActivate


class FrozenBatchNorm(ConvertedLayer):
    """(x - running_mean) / sqrt(running_var + eps) * weight + bias per channel, in training and evaluation alike.

    It has the parameters and buffers of BatchNorm under BatchNorm's names, so that a checkpoint of one loads into the
    other. Unlike torchvision's FrozenBatchNorm2d it trains `weight` and `bias`. No sample sees another. It is no
    `_BatchNorm`: what synchronizes or re-estimates BatchNorm would thaw it.

    Args:
        num_features: Channels C.
        eps: Added to the running variance.
        affine: Learn `weight` and `bias`.
        device: Device of parameters and buffers.
        dtype: Type of parameters and running statistics.
        bias: With `affine`, learn `bias`.

    Shape:
        (N, C, *) to the same, in the input's type and memory format.
    """

    source_name: ClassVar[str] = "BatchNorm2d"
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.affine = num_features, eps, affine
        for name, fill, present in (("weight", torch.ones, affine), ("bias", torch.zeros, affine and bias)):
            value = nn.Parameter(fill(num_features, device=device, dtype=dtype)) if present else None
            self.register_parameter(name, value)
        self.register_buffer("running_mean", torch.zeros(num_features, device=device, dtype=dtype))
        self.register_buffer("running_var", torch.ones(num_features, device=device, dtype=dtype))
        self.register_buffer("num_batches_tracked", torch.zeros((), device=device, dtype=torch.long))

    reset_parameters = reset_affine

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to `x`, (N, C, *)."""
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, training=False, eps=self.eps
        )

    def channel_map(self) -> ChannelMap:
        """Return the map."""
        return ChannelMap.of(self.running_mean, self.running_var, self.eps, self.weight, self.bias)

    def source_layer(self) -> nn.Module:
        """Return torch's or timm's BatchNorm, in evaluation, which has the same statistics."""
        return super().source_layer().eval()

    def _build_source(self, cls: Any) -> nn.Module:
        new: nn.Module = cls(self.num_features, self.eps, device="meta")
        return new

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return the constants, and gamma and beta behind them."""
        return None, trained_affine(self)

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, bias={self.bias is not None}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the checkpoint of a FrozenBatchNorm2d, which counts no batches."""
        key = prefix + "num_batches_tracked"
        if key not in state_dict:
            state_dict[key] = self.num_batches_tracked
        super()._load_from_state_dict(state_dict, prefix, *args)


class FrozenBatchNormAct(_ThenActivate, FrozenBatchNorm):
    """Frozen batch normalization, then `drop` and `act`: a counterpart of timm's BatchNormAct2d."""

    fused_source_name: ClassVar[str] = "BatchNormAct2d"
