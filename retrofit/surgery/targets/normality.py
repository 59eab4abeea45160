"""Targets bnn, lnn, gnn, inn and normal: each normalization layer to its normality-normalized
counterpart.

And dbn and dbnn: BatchNorm to decorrelated batch normalization, plain and with the power transform.
Strength 0 is the source layer, so that the network computes the same function, in training too,
until its strength is raised.
"""

import re
from typing import Any

import torch
from torch import nn

from retrofit import layers
from retrofit.conversion_options import FAMILIES, ConversionOptions
from retrofit.layers.decorrelated_batch_norm import GROUP_SIZE, largest_divisor
from retrofit.surgery.families import NormLayer
from retrofit.surgery.plan_and_report import LayerRow
from retrofit.surgery.planning import TARGETS, Converter, adopt


class NormalityConverter(Converter):
    """Swaps norm for norm: the source's tensors, a running lambda of 1 where statistics are
    tracked, strength 0.
    """

    def __init__(self, family: str | None = None) -> None:
        # the only one that the target stands for; None for each to its own
        self.family = family
        self.sources = (
            frozenset(FAMILIES) - {"frozen-bn"} if family is None else frozenset({family})
        )

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        if layer.family not in self.sources:
            own = (
                "its normality counterpart"
                if self.family is None
                else f"{FAMILIES[self.family]}; use `to='normal'`"
            )
            return layer.row(
                "unsupported", f"{layer.family_name} has no function-preserving path to {own}"
            )
        # timm's variants in float32, without a bias, or of one group are their class with other
        # arguments
        plain = re.sub("Fp32|NoBias|Exp|(?<=GroupNorm)1", "", layer.known_class)
        return layer.row(
            "converted", target=plain.replace("Norm", "NormalNorm"), **_options(options)
        )

    def build(self, module: Any, row: LayerRow, device: torch.device) -> Any:
        cls, mean = getattr(layers, str(row.target)), getattr(module, "running_mean", None)
        given = {
            **row.options,
            "strength": 0.0,
            "device": device,
            "dtype": None if mean is None else mean.dtype,
        }
        if isinstance(module, nn.LayerNorm):
            new = cls(module.normalized_shape, **given)
        elif isinstance(module, nn.GroupNorm):
            new = cls(module.num_groups, module.num_channels, **given)
        else:
            new = cls(module.num_features, track_running_stats=mean is not None, **given)
        return adopt(new, module)


class DecorrelatedConverter(NormalityConverter):
    """Swaps BatchNorm for its decorrelated form: the source's tensors, its own scaling as
    whitening, strength 0.
    """

    def __init__(self, normality: bool) -> None:
        super().__init__("bn")
        # whether the whitened values are gaussianized
        self.normality = normality

    def decide(self, layer: NormLayer, options: ConversionOptions) -> LayerRow:
        norm = "BatchNormalNorm" if self.normality else "BatchNorm"
        target, reason = layer.known_class.replace("BatchNorm", f"Decorrelated{norm}"), ""
        if layer.family != "bn":
            reason = (
                f"{layer.family_name} has no function-preserving path to whitening over the batch"
            )
        elif not hasattr(layers, target):
            reason = "whitening matrices are not synchronized between processes; convert it to BatchNorm first"
        elif layer.layer.running_mean is None:
            reason = "it tracks no running statistics, so there would be no whitening matrix at test time"
        if reason:
            return layer.row("unsupported", reason)
        most, channels = options.group_size or GROUP_SIZE, layer.layer.num_features
        size = largest_divisor(channels, most)
        reason = (
            f"whitened {size} channels at a time: {most} do not divide {channels} channels"
            if size != most
            else ""
        )
        given = _options(options) if self.normality else {}
        return layer.row("converted", reason, target, **given, group_size=size)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> Any:
        new = super().build(module, row, device)
        # by the source's running variance
        new.reset_running_whitening()
        return new


def _options(options: ConversionOptions) -> dict[str, Any]:
    """Return the constructor's options of a normality-normalized layer: the noise, and those that
    are set.
    """
    noise = (
        {} if options.noise == "paper" else {"noise": float(options.noise or 0)}
    )  # the layers' own is the paper's
    others = {"noise_kind": options.noise_kind, "alpha": options.alpha}
    return noise | {name: value for name, value in others.items() if value is not None}


TARGETS["bnn"] = NormalityConverter("bn")
TARGETS["lnn"] = NormalityConverter("ln")
TARGETS["gnn"] = NormalityConverter("gn")
TARGETS["inn"] = NormalityConverter("in")
TARGETS["normal"] = NormalityConverter()
TARGETS["dbnn"] = DecorrelatedConverter(normality=True)
TARGETS["dbn"] = DecorrelatedConverter(normality=False)
