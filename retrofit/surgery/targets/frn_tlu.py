"""Target frn-tlu: BatchNorm and the activation behind it to timm's FRN with a thresholded linear
unit (Singh and Krishnan 2020).
"""

from typing import Any

import torch
from torch import Tensor

from retrofit.layers.constant_maps import ChannelMap
from retrofit.surgery.targets.fused_layers import FusedConverter


class FilterResponseConverter(FusedConverter):
    """BatchNorm to `FilterResponseNormTlu2d`: gamma * h + beta on inputs whose mean square in each
    map is the running one, var + mean^2; tau = 0, ReLU's.
    """

    layer = "FilterResponseNormTlu2d"

    def migrated(
        self, new: Any, source: ChannelMap, mean: Tensor, mean_square: Tensor
    ) -> dict[str, Tensor]:
        slope, shift = source.affine()
        weight = slope * (mean_square + new.eps).sqrt()
        return {"weight": weight, "bias": shift, "tau": torch.zeros_like(shift)}


FRN_TLU = FilterResponseConverter()
