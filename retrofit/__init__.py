"""Turn a trained network into a normality-normalized or batch-independent one, with the same outputs at the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrofit.utils import lazy_names

__version__ = "0.2.0"

if TYPE_CHECKING:
    from retrofit import callbacks, layers
    from retrofit.errors import RetrofitError, UsageError
    from retrofit.export import export_onnx, fold
    from retrofit.export.bake import bake
    from retrofit.finetune.statistics import freeze_norms, recentre, sync_norms, update_bn
    from retrofit.networks.artifact import load, save
    from retrofit.networks.hub import push_to_hub, save_for_hub
    from retrofit.surgery import convert, plan, set_strength, strength_of
    from retrofit.surgery.plain import plain

__all__ = ["RetrofitError", "UsageError", "__version__", "bake", "callbacks", "convert", "export_onnx", "fold"]
__all__ += ["freeze_norms", "layers", "load", "plain", "plan", "push_to_hub", "recentre", "save", "save_for_hub"]
__all__ += ["set_strength", "strength_of", "sync_norms", "update_bn"]
__getattr__ = lazy_names(
    __name__,
    {
        "errors": ("RetrofitError", "UsageError"),
        "export": ("export_onnx", "fold"),
        "export.bake": ("bake",),
        "surgery.plain": ("plain",),
        "finetune.statistics": ("freeze_norms", "recentre", "sync_norms", "update_bn"),
        "networks.artifact": ("load", "save"),
        "networks.hub": ("push_to_hub", "save_for_hub"),
        "surgery": ("convert", "plan", "set_strength", "strength_of"),
    },
    packages=("callbacks", "layers"),
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
