"""Normality-normalized and batch-independent layers: the math and the modules. Needs only torch.

The layers of every other target, dbn's for one, are attributes here too, loaded at first use.
"""

# These register themselves.
import retrofit.builtin_targets  # noqa: F401
from retrofit.layers.batch_norm import (
    BatchNormalNorm1d,
    BatchNormalNorm2d,
    BatchNormalNorm3d,
    BatchNormalNormAct2d,
    SyncBatchNormalNorm,
    SyncBatchNormalNormAct,
)
from retrofit.layers.frozen_batch_norm import FrozenBatchNorm, FrozenBatchNormAct
from retrofit.layers.group_migration import migrated_group_norm
from retrofit.layers.migrated_norm import MigratedGroupNorm, MigratedGroupNormAct
from retrofit.layers.normality_mixin import NormalityMixin
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
from retrofit.registry import layer_named

__all__ = [
    "BatchNormalNorm1d", "BatchNormalNorm2d", "BatchNormalNorm3d", "BatchNormalNormAct2d",
    "FrozenBatchNorm", "FrozenBatchNormAct", "GroupNormalNorm", "GroupNormalNormAct", "InstanceNormalNorm1d",
    "InstanceNormalNorm2d", "InstanceNormalNorm3d", "LayerNormalNorm", "LayerNormalNorm2d", "LayerNormalNormAct",
    "LayerNormalNormAct2d", "MigratedGroupNorm", "MigratedGroupNormAct", "NormalityMixin", "ProxyNorm", "StrengthMixin",
    "SyncBatchNormalNorm", "SyncBatchNormalNormAct", "WeightStandardizedConv1d", "WeightStandardizedConv2d",
    "WeightStandardizedConv3d", "migrated_group_norm", "yeo_johnson",
]  # fmt: skip


def __getattr__(name: str) -> type:
    layer = layer_named(name)
    if layer is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return layer
