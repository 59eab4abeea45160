"""Target dbnn: BatchNorm to decorrelated batch normality normalization (Eftekhari & Papyan 2025,
table 3).

Whitening as in target dbn, then the power transform of the normality targets.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from retrofit.conversion_options import ConversionOptions
from retrofit.layers import batch_norm
from retrofit.layers.constant_maps import ChannelMap
from retrofit.layers.converted_layer import ThenActivate
from retrofit.layers.gaussianization import gaussianize
from retrofit.layers.power_transform import yeo_johnson
from retrofit.surgery.targets.dbn import DecorrelatedConverter, DecorrelatedNorm
from retrofit.surgery.targets.normality import gaussianization


class _ThenTransform(DecorrelatedNorm, batch_norm._BatchNormalNorm):
    """Mixin: lambda is estimated from each channel's whitened values, not standardized again: the
    estimate holds for any variance. Theirs is one but for eps, unless channels of a group depend on
    each other or outnumber its values.
    """

    def _transform(self, h: Tensor, batch: bool) -> tuple[Tensor, Tensor]:
        if not batch and self.running_lambda is not None:
            lmbda = 1 + self.effective_alpha * (self.running_lambda.to(h.dtype) - 1)
            return yeo_johnson(h, lmbda.view(-1, self.group_size, 1)), lmbda
        noise = 0.0
        if self.training:
            noise = self.noise
        y, lmbda = gaussianize(
            h.flatten(0, 1),
            (1,),
            strength=self._t,
            xi=noise,
            noise_kind=self.noise_kind,
            alpha=self.alpha,
        )
        return y.view_as(h), lmbda.detach()

    def _behind_whitening(self) -> ChannelMap:
        assert self.running_lambda is not None
        lmbda = 1 + self.effective_alpha.double() * (self.running_lambda.double() - 1)
        return replace(super()._behind_whitening(), lmbda=lmbda)


class DecorrelatedBatchNormalNorm1d(_ThenTransform, batch_norm.BatchNormalNorm1d):
    """Decorrelated batch normality normalization over (N, C) or (N, C, L) input (Eftekhari & Papyan
    2025, table 3).

    The arguments are those of `BatchNormalNorm1d` and of `DecorrelatedBatchNorm1d`.
    """


class DecorrelatedBatchNormalNorm2d(_ThenTransform, batch_norm.BatchNormalNorm2d):
    """Decorrelated batch normality normalization over (N, C, H, W) input; see
    `DecorrelatedBatchNormalNorm1d`.
    """


class DecorrelatedBatchNormalNorm3d(_ThenTransform, batch_norm.BatchNormalNorm3d):
    """Decorrelated batch normality normalization over (N, C, D, H, W) input; see
    `DecorrelatedBatchNormalNorm1d`.
    """


class DecorrelatedBatchNormalNormAct2d(ThenActivate, DecorrelatedBatchNormalNorm2d):
    """Decorrelated batch normality normalization, then `drop` and `act`."""


class DecorrelatedNormalityConverter(DecorrelatedConverter):
    """The same with whitened values gaussianized."""

    replacement = "DecorrelatedBatchNormalNorm"

    def layer_options(self, options: ConversionOptions) -> dict[str, Any]:
        return gaussianization(options)


DBNN = DecorrelatedNormalityConverter()
