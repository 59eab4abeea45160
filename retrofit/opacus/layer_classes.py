"""Our layers by what Opacus asks of them: whether a sample's output depends on other samples.

Opacus looks layers up by their exact class, so every class is listed, not its base alone.
"""

import inspect

from torch import nn

from retrofit import layers
from retrofit.layers.batch_norm import BatchStatisticsMixin
from retrofit.layers.sample_norms import _InstanceNormalNorm
from retrofit.layers.weight_standardization import WeightStandardization
from retrofit.registry import TARGETS

_INDEPENDENT_BASES = (
    layers.FrozenBatchNorm,
    layers.GroupNormalNorm,
    layers.LayerNormalNorm,
    layers.MigratedGroupNorm,
    layers.ProxyNorm,
    _InstanceNormalNorm,
    WeightStandardization,
)
_CLASSES = dict.fromkeys(
    [
        *(value for value in vars(layers).values() if inspect.isclass(value)),
        *(layer for target in TARGETS.values() for layer in target.load_layers()),
    ]
)

# Layers that normalize by the batch in training.
BATCH_DEPENDENT: list[type[nn.Module]] = [
    c for c in _CLASSES if issubclass(c, BatchStatisticsMixin)
]
# Layers whose outputs for one sample no other sample changes.
BATCH_INDEPENDENT: list[type[nn.Module]] = [
    c for c in _CLASSES if issubclass(c, _INDEPENDENT_BASES)
]
