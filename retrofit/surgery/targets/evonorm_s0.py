"""Target evonorm-s0: BatchNorm and the activation behind it to timm's EvoNorm-S0 (Liu et al.
2020).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from retrofit.conversion_options import ConversionOptions
from retrofit.layers.constant_maps import ChannelMap
from retrofit.surgery.converter import group_count
from retrofit.surgery.norm_layers import NormLayer
from retrofit.surgery.targets.fused_layers import FusedConverter

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

    def migrated(
        self, new: Any, source: ChannelMap, mean: Tensor, mean_square: Tensor
    ) -> dict[str, Tensor]:
        slope, shift = source.affine()
        if new.v is None:
            return {"weight": slope, "bias": shift}
        group_mean = mean.view(new.groups, -1).mean(1)
        group_var = mean_square.view(new.groups, -1).mean(1) - group_mean.square()
        std = (group_var + new.eps).sqrt().repeat_interleave(len(slope) // new.groups)
        steps = torch.arange(_SAMPLES, dtype=torch.float64, device=slope.device)
        normal = torch.special.ndtri((steps + 0.5) / _SAMPLES).unsqueeze(1)
        spread = source.gamma * normal
        expected = silu(spread + source.beta).mean(0)
        unshifted = silu(spread + slope * mean).mean(0)
        return {"v": slope, "weight": slope * std, "bias": expected - unshifted}


EVONORM_S0 = EvoNormConverter()
