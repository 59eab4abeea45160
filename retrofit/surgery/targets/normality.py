"""Targets bnn, lnn, gnn, inn and normal: each normalization layer to its normality-normalized
counterpart.

Strength 0 is the source layer, so that the network computes the same function, in training too,
until its strength is raised.
"""

import re
from typing import Any

import torch
from torch import nn

from retrofit.conversion_options import ConversionOptions
from retrofit.registry import layer_named
from retrofit.surgery.converter import Converter, adopt
from retrofit.surgery.norm_layers import NormLayer
from retrofit.surgery.plan_and_report import LayerRow


class NormalityConverter(Converter):
    """Swaps norm for norm: the source's tensors, a running lambda of 1 where statistics are
    tracked, strength 0.
    """

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        # timm's variants in float32, without a bias, or of one group are the plain class with
        # other arguments.
        source = re.sub("Fp32|NoBias|Exp|(?<=GroupNorm)1", "", layer.known_class)
        cls = source.replace("Norm", "NormalNorm")
        return layer.row("converted", target=cls, **gaussianization(options))

    def build(self, module: Any, row: LayerRow, device: torch.device) -> Any:
        cls: Any = layer_named(str(row.target))
        mean = getattr(module, "running_mean", None)
        arguments = {
            **row.options,
            "strength": 0.0,
            "device": device,
            "dtype": None if mean is None else mean.dtype,
        }
        if isinstance(module, nn.LayerNorm):
            new = cls(module.normalized_shape, **arguments)
        elif isinstance(module, nn.GroupNorm):
            new = cls(module.num_groups, module.num_channels, **arguments)
        else:
            new = cls(module.num_features, track_running_stats=mean is not None, **arguments)
        return adopt(new, module)


def gaussianization(options: ConversionOptions) -> dict[str, Any]:
    """Return the constructor's options of a normality-normalized layer: the noise, and those that
    are set.
    """
    settled = {"noise_kind": options.noise_kind, "alpha": options.alpha}
    # The layers' own noise is the paper's.
    if options.noise != "paper":
        settled["noise"] = float(options.noise or 0)
    return {name: value for name, value in settled.items() if value is not None}


NORMALITY = NormalityConverter()
