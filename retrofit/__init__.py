"""Turn a trained network into a normality-normalized or batch-independent one, with the same outputs at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.utils import lazy_names
from retrofit.version import __version__

if TYPE_CHECKING:
    from retrofit import callbacks as callbacks
    from retrofit import layers as layers
    from retrofit.errors import RetrofitError as RetrofitError
    from retrofit.errors import UsageError as UsageError
    from retrofit.export import export_onnx as export_onnx
    from retrofit.export import fold as fold
    from retrofit.export.bake import bake as bake
    from retrofit.finetune.batch_statistics import sync_norms as sync_norms
    from retrofit.finetune.running_statistics import freeze_norms as freeze_norms
    from retrofit.finetune.running_statistics import recentre as recentre
    from retrofit.finetune.running_statistics import update_bn as update_bn
    from retrofit.networks.artifact import load as load
    from retrofit.networks.artifact import save as save
    from retrofit.networks.hub import push_to_hub as push_to_hub
    from retrofit.networks.hub import save_for_hub as save_for_hub
    from retrofit.surgery import convert as convert
    from retrofit.surgery import plan as plan
    from retrofit.surgery import set_strength as set_strength
    from retrofit.surgery import strength_of as strength_of
    from retrofit.surgery.plain import plain as plain

_HOMES = {
    "errors": ("RetrofitError", "UsageError"),
    "export": ("export_onnx", "fold"),
    "export.bake": ("bake",),
    "surgery.plain": ("plain",),
    "finetune.batch_statistics": ("sync_norms",),
    "finetune.running_statistics": ("freeze_norms", "recentre", "update_bn"),
    "networks.artifact": ("load", "save"),
    "networks.hub": ("push_to_hub", "save_for_hub"),
    "surgery": ("convert", "plan", "set_strength", "strength_of"),
}
__all__ = ["__version__", "callbacks", "layers"]
__all__ += [name for names in _HOMES.values() for name in names]
__getattr__ = lazy_names(__name__, _HOMES, packages=("callbacks", "layers"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
