"""Layer, group and instance normality normalization: each normalized set lies in one sample."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from retrofit.layers import inference_forms, kernels, normalized_sets
from retrofit.layers.batch_norm import RunningNormality
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.converted_layer import ThenActivate, reset_affine
from retrofit.layers.normality_mixin import NormalityMixin
from retrofit.layers.normality_norm import Statistics, memory_format_of


class LayerNormalNorm(NormalityMixin, nn.LayerNorm):
    """Layer normality normalization over the trailing `normalized_shape`: `torch.nn.LayerNorm`'s
    counterpart.

    lambda is estimated for each set of values normalized together, in training and evaluation
    (Eftekhari & Papyan 2025, algorithm 1). The arguments are those of torch's layer, `noise` (xi,
    by default the paper's 1.0), `strength` (t, by default 1), and `noise_kind` and `alpha` of
    `NormalityMixin`.
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
        **options: Any,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        self._register_options(device, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (*, normalized_shape), each sample by itself.

        Raises:
            RuntimeError: If `x` does not end in `normalized_shape`.
        """
        shape = self.normalized_shape
        if x.shape[x.ndim - len(shape) :] != shape:
            raise RuntimeError(
                f"expected input that ends in normalized_shape={list(shape)}, but got {list(x.shape)}"
            )
        return self._by_own_statistics(x)[0]

    def _build_source(self, cls: Any) -> nn.Module:
        shape = self.normalized_shape
        new: nn.Module = cls(shape[0] if self.per_channel else shape, eps=self.eps, device="meta")
        return new

    def channel_dims(self, x: Tensor) -> tuple[int, ...]:
        if self.per_channel:
            return super().channel_dims(x)
        return tuple(range(x.ndim - len(self.normalized_shape)))

    def _sets(self) -> normalized_sets.Sets:
        return partial(normalized_sets.trailing_sets, len(self.normalized_shape))


class LayerNormalNorm2d(LayerNormalNorm):
    """Layer normality normalization of channels-first maps, (N, C, *): each position is normalized
    over C.

    The counterpart of timm's and torchvision's LayerNorm2d; keeps the input's memory format.
    `normalized_shape` is C.
    """

    source_name: ClassVar[str] = "LayerNorm2d"
    per_channel: ClassVar[bool] = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each position of `x`, (N, C, *), over its channels.

        Raises:
            RuntimeError: If `x` has another number of channels.
        """
        if x.ndim < 2 or x.shape[1] != self.normalized_shape[0]:
            raise RuntimeError(
                f"expected input of shape (N, {self.normalized_shape[0]}, *), but got {tuple(x.shape)}"
            )
        return self._by_own_statistics(x)[0]

    def _sets(self) -> normalized_sets.Sets:
        return normalized_sets.channel_sets

    def _source_form(self) -> nn.Module:
        form = inference_forms.ChannelsFirstLayerNorm
        return inference_forms.constant_copy(self._as_source(form))


class LayerNormalNormAct(ThenActivate, LayerNormalNorm):
    """Layer normality normalization, then `drop` and `act`: the counterpart of timm's
    LayerNormAct.
    """


class LayerNormalNormAct2d(ThenActivate, LayerNormalNorm2d):
    """Channels-first layer normality normalization, then `drop` and `act`: the counterpart of
    timm's LayerNormAct2d.
    """


class GroupNormalNorm(NormalityMixin, nn.GroupNorm):
    """Group normality normalization over (N, C, *) input: `torch.nn.GroupNorm`'s counterpart.

    lambda is estimated for each sample and group, in training and evaluation (Eftekhari & Papyan
    2025, algorithm 1). The arguments are those of torch's layer, `noise` (xi, by default the
    paper's 0.4), `strength` (t, by default 1), and `noise_kind` and `alpha` of `NormalityMixin`.
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
        **options: Any,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self._register_options(device, **options)

    reset_parameters = reset_affine

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each group of channels of each sample of `x`, (N, C, *).

        Raises:
            RuntimeError: If the groups do not divide the channels, or `x` has another number of
                channels than gamma.
            ValueError: If the groups of a single sample hold one value each.
        """
        self._refuse_other_channels(x)
        groups = self.num_groups
        # As torch's, which would make a constant of them
        if x.numel() == groups and x.shape[0] == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {list(x.shape)}"
            )
        last = memory_format_of(x)
        is_last = last != torch.contiguous_format
        # Sets in channels_last are stretches of a group's channels.
        if is_last and kernels.fits(x) and kernels.should_gather(x, x.shape[1] // groups):
            x = x.contiguous()
        out, _ = self._by_own_statistics(x)
        return out.contiguous(memory_format=last) if is_last else out

    def _refuse_other_channels(self, x: Tensor) -> None:
        fits = x.ndim > 1 and x.shape[1] % self.num_groups == 0
        if fits and self.weight is not None:
            # Kernels would read beyond gamma
            fits = x.shape[1] == self.num_channels
        if not fits:
            raise RuntimeError(
                f"expected input of shape (N, {self.num_channels}, *), in {self.num_groups} groups "
                f"of channels, but got {list(x.shape)}"
            )

    def _build_source(self, cls: Any) -> nn.Module:
        new: nn.Module = cls(
            num_groups=self.num_groups, num_channels=self.num_channels, eps=self.eps, device="meta"
        )
        return new

    def _sets(self) -> normalized_sets.Sets:
        return partial(normalized_sets.group_sets, self.num_groups)


class GroupNormalNormAct(ThenActivate, GroupNormalNorm):
    """Group normality normalization, then `drop` and `act`: the counterpart of timm's
    GroupNormAct.
    """


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
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device, dtype, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        """Normalize each channel of each sample of `x`, (N, C, *) or (C, *).

        Raises:
            ValueError: If `x` has another number of dimensions or channels, or, where it is
                normalized by itself, one value a channel.
        """
        ndim = self._batched_ndim
        getattr(nn, self.source_name)._check_input_dim(self, x)
        maps = x
        if x.ndim != ndim:
            maps = x.unsqueeze(0)
        channels = maps.shape[1]
        if channels != self.num_features and self.affine:
            raise ValueError(
                f"expected {self.num_features} channels (num_features), but got: {channels}."
            )
        if self.training or not self.track_running_stats:
            out = self._by_each_sample(maps)
        else:
            out = self._by_running_statistics(maps)
        if x.ndim == ndim:
            return out
        return out.squeeze(0)

    def _by_each_sample(self, x: Tensor) -> Tensor:
        """Normalize (N, C, *) by its own statistics, and follow their means over the batch."""
        if math.prod(x.shape[2:]) == 1:
            raise ValueError(
                f"Expected more than 1 spatial element when training, got input size {x.size()}"
            )
        out, stats = self._by_own_statistics(x)
        if stats is not None and self.running_mean is not None:
            spec = self._normalization()
            mean, var, lmbda, size = spec.statistics(x, self.weight, self.bias, stats)
            over_batch = Statistics(mean.mean(0), var.mean(0), lmbda.mean(0), size)
            self._update(over_batch, 0.0 if self.momentum is None else self.momentum)
        return out

    def channel_map(self) -> ChannelMap | None:
        # As in torch's layer, the flag decides, even where there are running statistics.
        return super().channel_map() if self.track_running_stats else None

    def _sets(self) -> normalized_sets.Sets:
        return partial(normalized_sets.trailing_sets, self._batched_ndim - 2)

    def _form(self) -> list[nn.Module]:
        form = inference_forms.in_sequence(super()._form())
        return [inference_forms.Batched(form, self._batched_ndim)]


class InstanceNormalNorm1d(_InstanceNormalNorm):
    """Instance normality normalization over (N, C, L) or (C, L) input: `torch.nn.InstanceNorm1d`'s
    counterpart.

    The arguments are those of torch's layer, `noise` (xi, by default the paper's 0.4), `strength`
    (t, by default 1), and `noise_kind` and `alpha` of `NormalityMixin`.
    """

    source_name: ClassVar[str] = "InstanceNorm1d"
    _batched_ndim = 3


class InstanceNormalNorm2d(_InstanceNormalNorm):
    """Instance normality normalization over (N, C, H, W) or (C, H, W); its arguments are
    `InstanceNormalNorm1d`'s.
    """

    source_name: ClassVar[str] = "InstanceNorm2d"
    _batched_ndim = 4


class InstanceNormalNorm3d(_InstanceNormalNorm):
    """Instance normality normalization over (N, C, D, H, W) or (C, D, H, W); see
    `InstanceNormalNorm1d`.
    """

    source_name: ClassVar[str] = "InstanceNorm3d"
    _batched_ndim = 5
