"""Target evonorm-s0: BatchNorm and the activation behind it to timm's EvoNorm-S0 (Liu et al.
2020).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from retrofit.conversion_options import ConversionOptions
from retrofit.layers.converted_layer import check_groups, hold_settings
from retrofit.surgery.converter import group_count
from retrofit.surgery.norm_layers import NormLayer
from retrofit.surgery.targets.fused_layers import FusedConverter, TrainedBatchNorm

# The paper's number of groups.
_GROUPS = 32
# Samples of a normal variable, uniform in probability.
_SAMPLES = 256


class EvoNormConverter(FusedConverter):
    """BatchNorm to `EvoNorm2dS0`.

    Without activation it is an affine map: gamma * h + beta, exactly. With one, x * sigmoid(v * x)
    / std has no shift before the gate. v = gamma / sigma and weight = v * std make it swish(gamma *
    (h + mean / sigma)), where std is the groups' by the running statistics, and the bias gives back
    the mean that swish(gamma * h + beta) has for normal h.
    """

    layer = "EvoNorm2dS0"

    def layer_options(
        self, layer: NormLayer, options: ConversionOptions
    ) -> tuple[dict[str, Any], str]:
        groups, remark = group_count(layer.name, layer.layer.num_features, options, _GROUPS)
        return {"groups": groups}, remark

    def migrated(self, new: Any, source: TrainedBatchNorm) -> dict[str, Tensor]:
        slope = source.slope
        if new.v is None:
            return {"weight": slope, "bias": source.beta - slope * source.mean}
        group_std = _group_std(source, new.groups, new.eps)
        std = group_std.repeat_interleave(len(slope) // new.groups)
        steps = torch.arange(_SAMPLES, dtype=torch.float64, device=slope.device)
        normal = torch.special.ndtri((steps + 0.5) / _SAMPLES).unsqueeze(1)
        expected = silu(source.gamma * normal + source.beta).mean(0)
        inputs = source.mean + source.sigma * normal
        unshifted = silu(slope * inputs).mean(0)
        return {"v": slope, "weight": slope * std, "bias": expected - unshifted}

    def hold(self, new: nn.Module, channels: int, device: torch.device) -> None:
        hold_settings(new, {"groups": partial(check_groups, channels)}, device)


def _group_std(source: TrainedBatchNorm, groups: int, eps: float) -> Tensor:
    """Return the standard deviation of each group's values, (groups,), by the running statistics."""
    channel_squares = source.var + source.mean.square()
    mean = source.mean.view(groups, -1).mean(1)
    mean_square = channel_squares.view(groups, -1).mean(1)
    return (mean_square - mean.square() + eps).sqrt()


EVONORM_S0 = EvoNormConverter()
