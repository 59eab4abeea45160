"""Targets dbn and dbnn: BatchNorm to decorrelated batch normalization, plain and with the power transform.

Strength 0 is the source layer, in training too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrofit import layers
from retrofit.errors import UsageError
from retrofit.layers.decorrelated import DecorrelatedNorm
from retrofit.layers.whitening import GROUP_SIZE, check_group_size, check_whitening, largest_divisor
from retrofit.surgery.census import FAMILIES, Found
from retrofit.surgery.converters import NORMALITY, Converter, Decision, Options, adopt, register
from retrofit.surgery.normality import affine_arguments, arguments, layer_options
from retrofit.surgery.records import LayerRow

_PLAIN: dict[str, type[DecorrelatedNorm]] = {
    "BatchNorm1d": layers.DecorrelatedBatchNorm1d,
    "BatchNorm2d": layers.DecorrelatedBatchNorm2d,
    "BatchNorm3d": layers.DecorrelatedBatchNorm3d,
    "BatchNormAct2d": layers.DecorrelatedBatchNormAct2d,
}
_NORMAL: dict[str, type[DecorrelatedNorm]] = {
    "BatchNorm1d": layers.DecorrelatedBatchNormalNorm1d,
    "BatchNorm2d": layers.DecorrelatedBatchNormalNorm2d,
    "BatchNorm3d": layers.DecorrelatedBatchNormalNorm3d,
    "BatchNormAct2d": layers.DecorrelatedBatchNormalNormAct2d,
}
_SYNCHRONIZED = "whitening matrices are not synchronized between processes; convert it to BatchNorm first"
_UNTRACKED = "it tracks no running statistics, so there would be no whitening matrix at test time"


class DecorrelatedConverter(Converter):
    """Swaps BatchNorm for its decorrelated form: the source's tensors, its own scaling as whitening, strength 0.

    Args:
        normality: Whether the whitened values are gaussianized.
    """

    sources = frozenset({"bn"})

    def __init__(self, normality: bool) -> None:
        self.normality = normality

    def prepare(self, model: nn.Module, found: list[Found], options: Options) -> None:
        """Reject options that have no meaning here or are out of range."""
        if options.groups is not None:
            raise UsageError("--groups counts groups; whitening takes --group-size N, the channels in each")
        options.refuse("decorrelated normalization", "pn_params", "pn_restore", "ws", "calibrate")
        if not self.normality:
            options.refuse("decorrelated normalization without the power transform", *NORMALITY)
        self._layer_options(options)

    def decide(self, found: Found, options: Options) -> Decision:
        """Convert every BatchNorm that has running statistics and keeps them to itself."""
        if found.family != "bn":
            family = FAMILIES[str(found.family)]
            return Decision(
                "unsupported", reason=f"{family} has no function-preserving path to whitening over the batch"
            )
        module: Any = found.module
        target = (_NORMAL if self.normality else _PLAIN).get(found.kind.rpartition(".")[2])
        if target is None:
            return Decision("unsupported", reason=_SYNCHRONIZED)
        if module.running_mean is None:
            return Decision("unsupported", reason=_UNTRACKED)
        settled = self._layer_options(options)
        wanted, channels = settled.get("group_size", GROUP_SIZE), module.num_features
        settled["group_size"] = size = largest_divisor(channels, wanted)
        reason = (
            "" if size == wanted else f"whitened {size} channels at a time: {wanted} do not divide {channels} channels"
        )
        return Decision("converted", target.__name__, reason, settled)

    def build(self, module: Any, row: LayerRow, device: torch.device) -> nn.Module:
        """Build the decorrelated layer around the source's tensors."""
        cls: Any = next(cls for cls in (*_PLAIN.values(), *_NORMAL.values()) if cls.__name__ == row.target)
        new = cls(*arguments(module), **affine_arguments(module), **row.options, device="meta", strength=0.0)
        adopt(new, module)
        new.register_buffer("strength", torch.zeros((), dtype=torch.float32, device=device))
        new.reset_running_whitening()
        if self.normality:
            new.register_buffer("running_lambda", torch.ones_like(module.running_mean))
        return new

    def _layer_options(self, options: Options) -> dict[str, Any]:
        """Return the constructor options that are asked for; raise `UsageError` if one is out of range."""
        settled = layer_options(options) if self.normality else {}
        try:
            if options.group_size is not None:
                settled["group_size"] = check_group_size(options.group_size)
            if options.whitening is not None:
                settled["whitening"] = check_whitening(options.whitening)
        except ValueError as error:
            raise UsageError(str(error)) from None
        return settled


register("dbn", "BatchNorm to decorrelated batch normalization", DecorrelatedConverter, normality=False)
register("dbnn", "BatchNorm to decorrelated batch normality normalization", DecorrelatedConverter, normality=True)
