"""Normality-normalized and batch-independent layers: the mathematics and the modules. Needs torch alone."""

from retrofit.layers.base import NormalityMixin, StrengthMixin
from retrofit.layers.batch import BatchNormalNorm1d, BatchNormalNorm2d, BatchNormalNorm3d, SyncBatchNormalNorm
from retrofit.layers.functional import (
    batch_normal_norm,
    channel_layer_normal_norm,
    group_normal_norm,
    instance_normal_norm,
    layer_normal_norm,
)
from retrofit.layers.group import GroupNormalNorm
from retrofit.layers.instance import InstanceNormalNorm1d, InstanceNormalNorm2d, InstanceNormalNorm3d
from retrofit.layers.layer import LayerNormalNorm, LayerNormalNorm2d
from retrofit.layers.norm_act import (
    BatchNormalNormAct2d,
    GroupNormalNormAct,
    LayerNormalNormAct,
    LayerNormalNormAct2d,
    SyncBatchNormalNormAct,
)
from retrofit.layers.transform import yeo_johnson

__all__ = [
    "BatchNormalNorm1d",
    "BatchNormalNorm2d",
    "BatchNormalNorm3d",
    "BatchNormalNormAct2d",
    "GroupNormalNorm",
    "GroupNormalNormAct",
    "InstanceNormalNorm1d",
    "InstanceNormalNorm2d",
    "InstanceNormalNorm3d",
    "LayerNormalNorm",
    "LayerNormalNorm2d",
    "LayerNormalNormAct",
    "LayerNormalNormAct2d",
    "NormalityMixin",
    "StrengthMixin",
    "SyncBatchNormalNorm",
    "SyncBatchNormalNormAct",
    "batch_normal_norm",
    "channel_layer_normal_norm",
    "group_normal_norm",
    "instance_normal_norm",
    "layer_normal_norm",
    "yeo_johnson",
]
