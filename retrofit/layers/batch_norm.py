"""BatchNormalNorm1d, 2d, 3d and their synchronized form (Eftekhari & Papyan 2025, algorithm 1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.layers.base import NormalityMixin
from retrofit.layers.batch_statistics_mixin import BatchStatisticsMixin
from retrofit.layers.channel_map import ChannelMap
from retrofit.layers.functional import batch_normal_norm
from retrofit.layers.normality_norm import NoiseKind
from retrofit.layers.sets import Sets, batch_sets


class RunningNormality(NormalityMixin, _NormBase):
    """torch's running statistics, with a running lambda beside them.

    Attributes:
        running_lambda: Running average of the lambda estimates, (C,), whatever the strength; the layer uses
            1 + `effective_alpha` * (running_lambda - 1).
    """

    running_lambda: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
        noise: float = 0.4,
        strength: float = 1.0,
        steps: int = 1,
        noise_kind: NoiseKind = "scaled",
        alpha: float = 1.0,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        if not bias:
            self.register_parameter("bias", None)
        if track_running_stats:
            self.register_buffer("running_lambda", torch.ones(num_features, device=device, dtype=dtype))
        else:
            self.register_buffer("running_lambda", None)
        self._register_options(noise, strength, steps, noise_kind, alpha, device)

    def reset_running_stats(self) -> None:
        """Return the running statistics to mean 0, variance 1, lambda 1, unless the layer is frozen."""
        if self.frozen:
            return
        super().reset_running_stats()
        if getattr(self, "running_lambda", None) is not None:
            self.running_lambda.fill_(1)  # type: ignore[union-attr]

    def reset_parameters(self) -> None:
        """Return the running statistics and the affine parameters, as far as there are any, to their first values."""
        self.reset_running_stats()
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def keeps_statistics(self) -> bool:
        """Whether the layer evaluates by running statistics."""
        return self.running_mean is not None

    def channel_map(self) -> ChannelMap | None:
        """Return the map by the running statistics, lambda as the strength has it."""
        if not self.keeps_statistics:
            return None
        assert self.running_mean is not None and self.running_var is not None  # noqa: PT018
        assert self.running_lambda is not None
        constant = ChannelMap.of(self.running_mean, self.running_var, self.eps, self.weight, self.bias)
        lmbda = 1 + self.effective_alpha.double() * (self.running_lambda.double() - 1)
        return replace(constant, lmbda=lmbda)

    def _build_source(self, cls: Any) -> nn.Module:
        options = {"affine": self.affine, "track_running_stats": self.track_running_stats, "device": "meta"}
        new: nn.Module = cls(self.num_features, self.eps, self.momentum, **options)
        return new

    def _tracked(self, used: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (self.running_mean, self.running_var, self.running_lambda) if used else (None, None, None)


class _BatchNormalNorm(BatchStatisticsMixin, RunningNormality):
    """Batch normality normalization: a set is a channel over (N, *)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (N, C, *), with the batch's statistics in training and the running ones after it."""
        self._check_input_dim(x)
        momentum: float | Tensor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            if x.numel():
                self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / self.num_batches_tracked.to(torch.float32)
        batch = self.training or self.running_mean is None
        return batch_normal_norm(
            x,
            *self._tracked(not self.training or self.track_running_stats),
            self.weight,
            self.bias,
            batch,
            momentum,
            self.eps,
            **self._options,
            group=self._group(),
        )

    def _sets(self) -> Sets:
        return batch_sets

    def _group(self) -> dist.ProcessGroup | None:
        return None

    def _check_input_dim(self, x: Tensor) -> None:
        raise NotImplementedError


class BatchNormalNorm1d(_BatchNormalNorm):
    """Batch normality normalization over (N, C) or (N, C, L) input: `torch.nn.BatchNorm1d`'s counterpart.

    Takes torch's arguments and `noise` (xi, the paper's 0.4), `strength` (t, 1) and `NormalityMixin`'s `noise_kind`,
    `alpha` and `steps`.
    """

    source_name: ClassVar[str] = "BatchNorm1d"

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim not in (2, 3):
            raise ValueError(f"expected 2D or 3D input (got {x.ndim}D input)")


class BatchNormalNorm2d(_BatchNormalNorm):
    """Batch normality normalization over (N, C, H, W) input: `torch.nn.BatchNorm2d`'s counterpart.

    Takes torch's arguments and `noise` (xi, the paper's 0.4), `strength` (t, 1) and `NormalityMixin`'s `noise_kind`,
    `alpha` and `steps`.
    """

    source_name: ClassVar[str] = "BatchNorm2d"

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim != 4:
            raise ValueError(f"expected 4D input (got {x.ndim}D input)")


class BatchNormalNorm3d(_BatchNormalNorm):
    """Batch normality normalization over (N, C, D, H, W) input: `torch.nn.BatchNorm3d`'s counterpart.

    Takes torch's arguments and `noise` (xi, the paper's 0.4), `strength` (t, 1) and `NormalityMixin`'s `noise_kind`,
    `alpha` and `steps`.
    """

    source_name: ClassVar[str] = "BatchNorm3d"

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim != 5:
            raise ValueError(f"expected 5D input (got {x.ndim}D input)")


class SyncBatchNormalNorm(_BatchNormalNorm):
    """Batch normality normalization with sets that span a process group: `torch.nn.SyncBatchNorm`'s counterpart.

    In training, once a process group is initialised, mean, variance and the moments of the lambda estimate are reduced
    over its ranks, which may hold batches of unequal size, and so are their gradients. Takes (N, C, *) input on any
    device.

    Args:
        process_group: The ranks to share statistics with; None for all.
        *args: As for `BatchNormalNorm2d`.
        **kwargs: As for `BatchNormalNorm2d`.
    """

    source_name: ClassVar[str] = "SyncBatchNorm"

    def __init__(self, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    def source_layer(self) -> nn.Module:
        """Return torch's or timm's synchronized layer, for the same ranks."""
        new: Any = super().source_layer()
        new.process_group = self.process_group
        return new

    def _group(self) -> dist.ProcessGroup | None:
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None

    def _check_input_dim(self, x: Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"expected at least 2D input (got {x.ndim}D input)")
