"""Which modules of a network are normalization layers, and of which family.

Layers are matched by exact class, named by module path so that neither timm nor torchvision is imported to ask. A
subclass that is not in the table may compute something else: it is reported, never treated as its parent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from retrofit.layers import StrengthMixin

FAMILIES = {
    "bn": "BatchNorm",
    "ln": "LayerNorm",
    "gn": "GroupNorm",
    "in": "InstanceNorm",
    "frozen-bn": "frozen BatchNorm",
}

_TORCH = "torch.nn.modules"
_TIMM = "timm.layers"

KNOWN: dict[str, str] = {
    **{f"{_TORCH}.batchnorm.{name}": "bn" for name in ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")},
    **{f"{_TIMM}.norm_act.{name}": "bn" for name in ("BatchNormAct2d", "SyncBatchNormAct")},
    f"{_TORCH}.normalization.LayerNorm": "ln",
    **{
        f"{_TIMM}.norm.{name}": "ln"
        for name in ("LayerNorm", "LayerNormFp32", "LayerNorm2d", "LayerNorm2dFp32", "LayerNormExp2d")
    },
    **{
        f"{_TIMM}.norm_act.{name}": "ln"
        for name in ("LayerNormAct", "LayerNormActFp32", "LayerNormAct2d", "LayerNormAct2dFp32")
    },
    "timm.models.metaformer.LayerNormNoBias": "ln",
    "timm.models.metaformer.LayerNorm2dNoBias": "ln",
    "torchvision.models.convnext.LayerNorm2d": "ln",
    f"{_TORCH}.normalization.GroupNorm": "gn",
    **{f"{_TIMM}.norm.{name}": "gn" for name in ("GroupNorm", "GroupNorm1")},
    **{f"{_TIMM}.norm_act.{name}": "gn" for name in ("GroupNormAct", "GroupNorm1Act")},
    "timm.models.metaformer.GroupNorm1NoBias": "gn",
    **{f"{_TORCH}.instancenorm.InstanceNorm{n}d": "in" for n in (1, 2, 3)},
    "torchvision.ops.misc.FrozenBatchNorm2d": "frozen-bn",
    f"{_TIMM}.norm_act.FrozenBatchNormAct2d": "frozen-bn",
    **{f"retrofit.layers.frozen_batch_norm.{name}": "frozen-bn" for name in ("FrozenBatchNorm", "FrozenBatchNormAct")},
}
"""Family of every class that a converter may take."""

THAWED = ("FrozenBatchNorm2d", "FrozenBatchNormAct2d")
"""The frozen classes whose gamma and beta are constants."""

_RMS = "RMS normalization subtracts no mean, and the paper defines no counterpart for it"
_FUSED = "a normalization fused with its activation, which leaves nothing between the two"
_REPLACED = "its forward was replaced on the instance, so that it may compute something else"
_LAZY = "not initialised yet; run one forward pass and convert again"

UNSUPPORTED: dict[str, tuple[str | None, str]] = {
    f"{_TORCH}.normalization.RMSNorm": (None, _RMS),
    **{f"{_TIMM}.norm.{name}": (None, _RMS) for name in ("RmsNorm", "RmsNormFp32", "RmsNorm2d", "RmsNorm2dFp32")},
    **{f"{_TIMM}.norm.{name}": (None, _RMS) for name in ("SimpleNorm", "SimpleNormFp32", "SimpleNorm2d")},
    f"{_TIMM}.norm.SimpleNorm2dFp32": (None, _RMS),
    **{f"{_TIMM}.norm_act.{name}": (None, _RMS) for name in ("RmsNormAct", "RmsNormActFp32", "RmsNormAct2d")},
    f"{_TIMM}.norm_act.RmsNormAct2dFp32": (None, _RMS),
    f"{_TIMM}.grn.GlobalResponseNorm": (None, "a response normalization inside an MLP, which standardises nothing"),
    f"{_TORCH}.normalization.LocalResponseNorm": (None, "a response normalization, which standardises nothing"),
    f"{_TORCH}.normalization.CrossMapLRN2d": (None, "a response normalization, which standardises nothing"),
    **{f"{_TORCH}.batchnorm.LazyBatchNorm{n}d": ("bn", _LAZY) for n in (1, 2, 3)},
    **{f"{_TORCH}.instancenorm.LazyInstanceNorm{n}d": ("in", _LAZY) for n in (1, 2, 3)},
    f"{_TIMM}.inplace_abn.InplaceAbn": ("bn", _FUSED),
    f"{_TIMM}.filter_response_norm.FilterResponseNormTlu2d": (None, _FUSED),
    f"{_TIMM}.filter_response_norm.FilterResponseNormAct2d": (None, _FUSED),
}
"""Family of, and reason for, the classes that no conversion takes."""

_BASES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.modules.batchnorm._BatchNorm, "bn"),
    (nn.modules.instancenorm._InstanceNorm, "in"),
    (_NormBase, "bn"),
    (nn.LayerNorm, "ln"),
    (nn.GroupNorm, "gn"),
)
_NAMED_NORM = re.compile(r"(Norm|BN|EvoNorm\w*)(_?\d?[dD])?(NoBias|Act|Fp32|\d[dD])*$")


@dataclass(frozen=True)
class NormLayer:
    """A normalization layer as found in a network.

    Attributes:
        name: Dotted module name; empty for the root. A module with several names is found under each.
        module: The layer.
        kind: Full name of its class.
        family: Key of `FAMILIES`, or None.
        status: "known" (a converter may take it), "kept" or "unsupported" (none does, for `reason`).
        reason: Why none does.
    """

    name: str
    module: nn.Module
    kind: str
    family: str | None
    status: str
    reason: str = ""

    @property
    def label(self) -> str:
        """Class name for people."""
        return type(self.module).__name__


def find_norms(model: nn.Module) -> Iterator[NormLayer]:
    """Yield every normalization layer of `model`, under every name it is registered by, in the model's order."""
    for name, module in model.named_modules(remove_duplicate=False):
        found = classify(name, module)
        if found is not None:
            yield found


def classify(name: str, module: nn.Module) -> NormLayer | None:
    """Return what kind of normalization layer `module` is, or None if it is none."""
    cls = type(module)
    kind = f"{cls.__module__}.{cls.__qualname__}"
    if kind in KNOWN and "forward" in vars(module):
        return NormLayer(name, module, kind, KNOWN[kind], "unsupported", _REPLACED)
    if kind in KNOWN:
        return NormLayer(name, module, kind, KNOWN[kind], "known")
    if kind in UNSUPPORTED:
        return NormLayer(name, module, kind, UNSUPPORTED[kind][0], "unsupported", UNSUPPORTED[kind][1])
    if isinstance(module, StrengthMixin):
        return NormLayer(name, module, kind, None, "kept", "already converted")
    for base, family in _BASES:
        if isinstance(module, base):
            reason = f"an unknown subclass of {base.__name__.lstrip('_')}, which may compute something else"
            return NormLayer(name, module, kind, family, "unsupported", reason)
    if _NAMED_NORM.search(cls.__name__) and _holds_own_tensors(module):
        return NormLayer(name, module, kind, None, "unsupported", f"no converter knows the class {kind}")
    return None


def _holds_own_tensors(module: nn.Module) -> bool:
    """Whether the module itself holds parameters or buffers, and is not just a container named after its norm."""
    own = (
        next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    )
    return own and not any(classify("", child) for child in module.modules() if child is not module)
