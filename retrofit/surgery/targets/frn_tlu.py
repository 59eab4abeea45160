"""Target frn-tlu: BatchNorm and the activation behind it to timm's FRN with a thresholded linear
unit (Singh and Krishnan 2020).
"""

from typing import Any

import torch
from torch import Tensor

from retrofit.surgery.targets.fused_layers import FusedConverter, TrainedBatchNorm


class FilterResponseConverter(FusedConverter):
    """BatchNorm to `FilterResponseNormTlu2d`: gamma * h + beta on inputs whose mean square in each
    map is the running one, var + mean^2; tau = 0, ReLU's.
    """

    layer = "FilterResponseNormTlu2d"

    def migrated(self, new: Any, source: TrainedBatchNorm) -> dict[str, Tensor]:
        mean_square = source.var + source.mean.square()
        return {
            "weight": source.slope * (mean_square + new.eps).sqrt(),
            "bias": source.beta - source.slope * source.mean,
            "tau": torch.zeros_like(source.mean),
        }


FRN_TLU = FilterResponseConverter()
