"""`retrofit.NORMS`: the classes of normalization layers, torch's and ours."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.layers.frozen_batch_norm import FrozenBatchNorm, TrainedAffine
from retrofit.layers.proxy_norm import ProxyNorm

NORMS: tuple[type[nn.Module], ...] = (
    # Batch and instance normalization, and all of ours that keep running statistics.
    _NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    FrozenBatchNorm,
    ProxyNorm,
    # gamma and beta of a frozen layer in `retrofit.plain`
    TrainedAffine,
)
"""The classes of normalization layers, for `isinstance`: torch's (timm derives from them) and ours.

Converted layers derive from torch's class where they keep its meaning. `FrozenBatchNorm` is no
`_BatchNorm`, because code that synchronizes, resets or re-estimates those would unfreeze it.
"""
