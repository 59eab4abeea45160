"""Normality-normalized and batch-independent layers: the math and the modules. Needs only torch."""

from retrofit.layers.base import NormalityMixin
from retrofit.layers.batch_norm import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    BatchNormalNorm3d,
    BatchNormalNormAct2d,
    SyncBatchNormalNorm,
    SyncBatchNormalNormAct,
)
from retrofit.layers.decorrelated_batch_norm import (
    DecorrelatedBatchNorm1d,
    DecorrelatedBatchNorm2d,
    DecorrelatedBatchNorm3d,
    DecorrelatedBatchNormAct2d,
    DecorrelatedBatchNormalNorm1d,
    DecorrelatedBatchNormalNorm2d,
    DecorrelatedBatchNormalNorm3d,
    DecorrelatedBatchNormalNormAct2d,
)
from retrofit.layers.frozen_batch_norm import FrozenBatchNorm, FrozenBatchNormAct
from retrofit.layers.migrated_group_norm import (
    MigratedGroupNorm,
    MigratedGroupNormAct,
    migrated_group_norm,
)
from retrofit.layers.power_transform import yeo_johnson
from retrofit.layers.proxy_norm import ProxyNorm
from retrofit.layers.sample_norms import (
    GroupNormalNorm,
    GroupNormalNormAct,
    InstanceNormalNorm1d,
    InstanceNormalNorm2d,
    InstanceNormalNorm3d,
    LayerNormalNorm,
    LayerNormalNorm2d,
    LayerNormalNormAct,
    LayerNormalNormAct2d,
)
from retrofit.layers.strength import StrengthMixin
from retrofit.layers.weight_standardization import (
    WeightStandardizedConv1d,
    WeightStandardizedConv2d,
    WeightStandardizedConv3d,
)

__all__ = [
    "BatchNormalNorm1d", "BatchNormalNorm2d", "BatchNormalNorm3d", "BatchNormalNormAct2d", "DecorrelatedBatchNorm1d",
    "DecorrelatedBatchNorm2d", "DecorrelatedBatchNorm3d", "DecorrelatedBatchNormAct2d", "DecorrelatedBatchNormalNorm1d",
    "DecorrelatedBatchNormalNorm2d", "DecorrelatedBatchNormalNorm3d", "DecorrelatedBatchNormalNormAct2d",
    "FrozenBatchNorm", "FrozenBatchNormAct", "GroupNormalNorm", "GroupNormalNormAct", "InstanceNormalNorm1d",
    "InstanceNormalNorm2d", "InstanceNormalNorm3d", "LayerNormalNorm", "LayerNormalNorm2d", "LayerNormalNormAct",
    "LayerNormalNormAct2d", "MigratedGroupNorm", "MigratedGroupNormAct", "NormalityMixin", "ProxyNorm", "StrengthMixin",
    "SyncBatchNormalNorm", "SyncBatchNormalNormAct", "WeightStandardizedConv1d", "WeightStandardizedConv2d",
    "WeightStandardizedConv3d", "migrated_group_norm", "yeo_johnson",
]  # fmt: skip
