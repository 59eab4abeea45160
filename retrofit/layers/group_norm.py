"""GroupNormalNorm."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from retrofit.layers import kernels
from retrofit.layers.base import NormalityMixin
from retrofit.layers.converted_layer import _ThenActivate, reset_affine
from retrofit.layers.normality_norm import NormalityOptions
from retrofit.layers.normalized_sets import Sets, group_sets, memory_format_of


class GroupNormalNorm(NormalityMixin, nn.GroupNorm):
    """Group normality normalization over (N, C, *) input: `torch.nn.GroupNorm`'s counterpart.

    lambda is estimated from each sample and group, in training and after (Eftekhari & Papyan 2025, algorithm 1). Takes
    torch's arguments and `noise` (xi, the paper's 0.4), `strength` (t, 1) and `NormalityMixin`'s `noise_kind` and
    `alpha`.
    """

    source_name: ClassVar[str] = "GroupNorm"

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        **options: Unpack[NormalityOptions],
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self._register_options(device, **options)

    reset_parameters = reset_affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (N, C, *)."""
        groups = self.num_groups
        if x.ndim < 2 or x.shape[1] % groups:
            raise RuntimeError(f"expected input (N, C, *) with C divisible by num_groups={groups}, got {list(x.shape)}")
        if x.numel() == groups and x.shape[0] == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
        last = memory_format_of(x)
        if last != torch.contiguous_format and kernels.fits(x) and kernels.moves(x, x.shape[1] // groups):
            # Sets in channels_last are stretches of a group's channels.
            return self._by_own_statistics(x.contiguous())[0].contiguous(memory_format=last)
        return self._by_own_statistics(x)[0]

    def _build_source(self, cls: Any) -> nn.Module:
        new: nn.Module = cls(num_groups=self.num_groups, num_channels=self.num_channels, eps=self.eps, device="meta")
        return new

    def _sets(self) -> Sets:
        return partial(group_sets, self.num_groups)


class GroupNormalNormAct(_ThenActivate, GroupNormalNorm):
    """Group normality normalization, then `drop` and `act`: the counterpart of timm's GroupNormAct."""
