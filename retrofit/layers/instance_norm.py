"""InstanceNormalNorm1d, 2d, 3d."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.forms import Batched, in_sequence
from retrofit.layers.normality_norm import Statistics
from retrofit.layers.normalized_sets import Sets, trailing_sets


class _InstanceNormalNorm(RunningNormality):
    """Instance normality normalization: a set is each sample and channel over (*)."""

    _batched_ndim: ClassVar[int]

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (N, C, *) or (C, *), with the sample's statistics (eval: the running ones, where tracked)."""
        batched = x.ndim == self._batched_ndim
        if not batched and x.ndim != self._batched_ndim - 1:
            raise ValueError(f"expected {self._batched_ndim - 1}D or {self._batched_ndim}D input (got {x.ndim}D input)")
        maps = x if batched else x.unsqueeze(0)
        if maps.shape[1] != self.num_features and self.affine:
            raise ValueError(f"expected {self.num_features} channels (num_features), but got: {maps.shape[1]}.")
        if self.training or not self.track_running_stats:
            if math.prod(maps.shape[2:]) == 1:
                raise ValueError(f"Expected more than 1 spatial element when training, got input size {maps.size()}")
            out, statistics = self._by_own_statistics(maps)
            if statistics is not None:
                mean, var, lmbda = (s.mean(0) for s in statistics[:3])
                statistics = Statistics(mean, var, lmbda, statistics.size)
            self._update(statistics, 0.0 if self.momentum is None else self.momentum)
        else:
            out = self._by_running_statistics(maps)
        return out if batched else out.squeeze(0)

    @property
    def keeps_statistics(self) -> bool:
        """Whether the layer evaluates by running statistics: as torch's, by its setting, not by its buffers."""
        return bool(self.track_running_stats) and self.running_mean is not None

    def _sets(self) -> Sets:
        return partial(trailing_sets, self._batched_ndim - 2)

    def _form(self) -> list[nn.Module]:
        return [Batched(in_sequence(super()._form()), self._batched_ndim)]


class InstanceNormalNorm1d(_InstanceNormalNorm):
    """Instance normality normalization over (N, C, L) or (C, L) input: `torch.nn.InstanceNorm1d`'s counterpart.

    Takes torch's arguments and `noise` (xi, the paper's 0.4), `strength` (t, 1) and `NormalityMixin`'s `noise_kind` and
    `alpha`.
    """

    source_name: ClassVar[str] = "InstanceNorm1d"
    _batched_ndim = 3


class InstanceNormalNorm2d(_InstanceNormalNorm):
    """Instance normality normalization over (N, C, H, W) or (C, H, W); its arguments are `InstanceNormalNorm1d`'s."""

    source_name: ClassVar[str] = "InstanceNorm2d"
    _batched_ndim = 4


class InstanceNormalNorm3d(_InstanceNormalNorm):
    """Instance normality normalization over (N, C, D, H, W) or (C, D, H, W), in the same way."""

    source_name: ClassVar[str] = "InstanceNorm3d"
    _batched_ndim = 5
