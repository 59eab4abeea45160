"""BatchNormalNorm1d, 2d, 3d and their synchronized form (Eftekhari & Papyan 2025, algorithm 1)."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from retrofit.errors import RetrofitError
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.converted_layer import ThenActivate, library_class, reset_affine
from retrofit.layers.frozen_batch_norm import of_one_type, trained_affine
from retrofit.layers.function_transforms import followed
from retrofit.layers.kernels.kernel_options import Running
from retrofit.layers.normality_mixin import NormalityMixin
from retrofit.layers.normality_norm import Statistics, apply_statistics
from retrofit.layers.normalized_sets import Sets, batch_sets
from retrofit.layers.strength import StrengthMixin

_SYNC = "call retrofit.sync_norms(model) in its place"
_INSTEAD = {"convert_sync_batchnorm": _SYNC, "convert_splitbn_model": "leave it out"}


class EpsOfNoBatchNorm:
    """The eps of a layer above strength 0, to be shown and compared with another. It is no number:
    code that adds it to a variance, to fuse the layer for example, takes the layer for a BatchNorm,
    and gets a RetrofitError that says so; other arithmetic, a TypeError.
    """

    def __init__(self, value: float, layer: StrengthMixin) -> None:
        self.value, self.layer = value, type(layer).__name__

    def __repr__(self) -> str:
        return repr(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)

    def _refuse(self, *_: object) -> NoReturn:
        raise RetrofitError(
            f"this code takes {self.layer} for a BatchNorm, which it is at strength 0 alone, by its eps; call the "
            "layer, or fuse with retrofit.fold(model)"
        )

    __float__ = __add__ = __radd__ = __lt__ = __le__ = _refuse


class BatchStatisticsMixin(StrengthMixin, _BatchNorm):
    """A layer that normalizes by the batch in training and keeps running statistics: to torch, a
    `_BatchNorm`.

    `torch.optim.swa_utils.update_bn`, Lightning's weight averaging and others look for those to
    estimate their statistics anew. What would put a plain BatchNorm in its place is refused by
    `named_children`, the one call that all such functions make; what fuses it into a convolution
    adds its eps to its variance: see `EpsOfNoBatchNorm`.
    """

    _eps: float

    @property
    def eps(self) -> Any:
        """Added to the variance; of use to others at strength 0 alone, where the layer is a
        BatchNorm.
        """
        return self._eps if float(self.strength) == 0 else EpsOfNoBatchNorm(self._eps, self)

    @eps.setter
    def eps(self, value: float) -> None:
        # torch's `extra_repr` reads the first, our layers the second, which no property hides.
        vars(self).update(eps=value, _eps=value)

    @property
    def plain_eps(self) -> float:
        return self._eps

    def plain_layer(self) -> tuple[tuple[Tensor, Tensor] | None, nn.Module]:
        """Return the source's layer; for a frozen one, which that would thaw, its constants and
        gamma and beta.
        """
        plain = super().plain_layer()
        if self.frozen and self.running_mean is not None:
            return None, trained_affine(self)
        return plain

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the children; freeze or thaw if timm's function calls, refuse one that would
        replace the layer.

        These functions take any `_BatchNorm` for one, and look at its class, attributes and
        children alone, as harmless code does. Only the caller's name tells them apart.

        Raises:
            RetrofitError: If the caller puts a plain BatchNorm in the layer's place.
        """
        caller = sys._getframe(1).f_code.co_name
        if caller in _INSTEAD:
            raise RetrofitError(
                f"{caller} would put a plain BatchNorm in the place of {type(self).__name__}, without its transform; "
                f"{_INSTEAD[caller]}"
            )
        if caller in ("freeze_batch_norm_2d", "unfreeze_batch_norm_2d"):
            self.frozen = caller == "freeze_batch_norm_2d"
            self.training = not self.frozen
        return super().named_children()

    def _check_input_dim(self, x: Tensor) -> None:
        library_class(self.source_name)._check_input_dim(self, x)


class RunningStatistics(StrengthMixin, _NormBase):
    """torch's running statistics and constructor arguments, `bias`, and the options of the layer's
    kind.
    """

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
        **options: Any,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            self.register_parameter("bias", None)
        self._register_options(device, **options)

    def reset_running_stats(self) -> None:
        """Reset the running statistics to mean 0, variance 1 and lambda 1, unless the layer is
        frozen.
        """
        if self.frozen:
            return
        super().reset_running_stats()
        if self._buffers.get("running_lambda") is not None:
            nn.init.ones_(self.running_lambda)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        reset_affine(self)

    def _momentum(self, size: Tensor | int) -> float | Tensor:
        """Count a batch whose sets have that size over all ranks, unless it is empty on every one,
        and return its weight in the running statistics.
        """
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(size > 0 if isinstance(size, Tensor) else 1)
            if self.momentum is None:
                return 1.0 / self.num_batches_tracked.to(torch.float32)
        return 0.0 if self.momentum is None else self.momentum

    def _update(self, statistics: Statistics, momentum: float | Tensor) -> None:
        """Move the running statistics, as far as there are any, towards a batch's."""
        size = statistics.size
        if isinstance(size, Tensor):
            size = size.to(torch.float32)
        unbiased = statistics.var * (size / (size - 1))
        new = {"mean": statistics.mean, "var": unbiased, "lambda": statistics.lmbda}
        for name, value in new.items():
            running = self._buffers.get(f"running_{name}")
            if running is None:
                continue
            batch = value.reshape(running.shape).to(running.dtype)
            moved = running * (1 - momentum) + batch * momentum
            if isinstance(size, Tensor):
                # Every rank's share may be empty, which a GPU alone knows
                moved = torch.where(size > 0, moved, running)
            running.copy_(moved)

    def _build_source(self, cls: Any) -> nn.Module:
        options = {
            "affine": self.affine,
            "track_running_stats": self.track_running_stats,
            "device": "meta",
        }
        new: nn.Module = cls(self.num_features, self.plain_eps, self.momentum, **options)
        return new


class RunningNormality(NormalityMixin, RunningStatistics):
    """Running statistics with a running lambda beside them.

    Attributes:
        running_lambda: Running average of the lambda estimates, (C,), whatever the strength; the
            layer uses 1 + `effective_alpha` * (running_lambda - 1).
    """

    running_lambda: Tensor | None

    def _register_options(self, device: Any = None, **options: Any) -> None:
        lmbda = None if self.running_mean is None else torch.ones_like(self.running_mean)
        self.register_buffer("running_lambda", lmbda)
        super()._register_options(device, **options)

    def channel_map(self) -> ChannelMap | None:
        if self.running_mean is None:
            return None
        layer: Any = self
        constant = ChannelMap.of(
            self.running_mean, layer.running_var, self.plain_eps, self.weight, self.bias
        )
        return replace(
            constant, lmbda=1 + self.effective_alpha.double() * (layer.running_lambda.double() - 1)
        )

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        layer: Any = self
        # An instance norm that was set to track after it was built
        if self.running_mean is None:
            raise ValueError("running statistics are needed outside training")
        mean = layer.running_mean
        var = layer.running_var
        eps = self.plain_eps
        affine = self.weight, self.bias
        effective_lambda = 1 + self.effective_alpha * (layer.running_lambda - 1)
        # A compiler or a transform cannot branch on values, and a GPU would have to be waited for.
        if not followed() and effective_lambda.is_cpu and bool((effective_lambda == 1).all()):
            # torch's own layer, bit for bit
            return functional.batch_norm(x, *of_one_type(x, mean, var, *affine), eps=eps)
        return apply_statistics(x, mean, var, effective_lambda, *affine, eps)


class _BatchNormalNorm(BatchStatisticsMixin, RunningNormality):
    """Batch normality normalization: a set is a channel over (N, *)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, (N, C, *), with the batch's statistics in training and the running ones
        after it.

        Raises:
            ValueError: If a channel has a single value to normalize, or `x` has another number of
                dimensions.
        """
        self._check_input_dim(x)
        if not self.training and self.running_mean is not None:
            return self._by_running_statistics(x)
        group = self._group()
        if group is None and x.numel() == x.shape[1]:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {x.size()}"
            )
        tracks = self.training and self.track_running_stats
        running = None
        # Kernels take no average over all batches
        if tracks and self.momentum is not None:
            buffers = self._buffers
            running = Running(
                mean=buffers["running_mean"],
                var=buffers["running_var"],
                lmbda=buffers["running_lambda"],
                tracked=buffers["num_batches_tracked"],
                momentum=self.momentum,
            )
        out, stats = self._by_own_statistics(x, group, running)
        if tracks and stats is not None:
            spec = self._normalization(group)
            statistics = spec.statistics(x, self.weight, self.bias, stats)
            self._update(statistics, self._momentum(statistics.size))
        return out

    def _sets(self) -> Sets:
        return batch_sets

    def _group(self) -> dist.ProcessGroup | None:
        return None


class BatchNormalNorm1d(_BatchNormalNorm):
    """Batch normality normalization over (N, C) or (N, C, L) input: `torch.nn.BatchNorm1d`'s
    counterpart.

    The arguments are those of torch's layer, `noise` (xi, by default the paper's 0.4), `strength`
    (t, by default 1), and `noise_kind` and `alpha` of `NormalityMixin`.
    """

    source_name: ClassVar[str] = "BatchNorm1d"


class BatchNormalNorm2d(_BatchNormalNorm):
    """Batch normality normalization over (N, C, H, W) input; its arguments are
    `BatchNormalNorm1d`'s.
    """

    source_name: ClassVar[str] = "BatchNorm2d"


class BatchNormalNorm3d(_BatchNormalNorm):
    """Batch normality normalization over (N, C, D, H, W) input; its arguments are
    `BatchNormalNorm1d`'s.
    """

    source_name: ClassVar[str] = "BatchNorm3d"


class SyncBatchNormalNorm(_BatchNormalNorm):
    """Batch normality normalization with sets that span a process group: `torch.nn.SyncBatchNorm`'s
    counterpart.

    In training, once a process group is initialized, the mean, variance, moments of the lambda
    estimate and their gradients are reduced across its ranks, whose batch sizes may differ. The
    input is (N, C, *), on any device. The arguments are `BatchNormalNorm1d`'s and `process_group`,
    the ranks that share statistics; None for all.
    """

    source_name: ClassVar[str] = "SyncBatchNorm"

    def __init__(
        self, *args: Any, process_group: dist.ProcessGroup | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.process_group = process_group

    def source_layer(self) -> nn.Module:
        new: Any = super().source_layer()
        new.process_group = self.process_group
        return new

    def _group(self) -> dist.ProcessGroup | None:
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = self.process_group if self.process_group is not None else dist.group.WORLD
        return group if dist.get_world_size(group) > 1 else None


class BatchNormalNormAct2d(ThenActivate, BatchNormalNorm2d):
    """Batch normality normalization, then `drop` and `act`: the counterpart of timm's
    BatchNormAct2d.
    """


class SyncBatchNormalNormAct(ThenActivate, SyncBatchNormalNorm):
    """Synchronized batch normality normalization, then `drop` and `act`: the counterpart of timm's
    SyncBatchNormAct.
    """
