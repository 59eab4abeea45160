"""Turn a trained network into a normality-normalized or batch-independent one, with the same outputs at the start."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrofit.version import __version__

if TYPE_CHECKING:
    from retrofit import callbacks, layers
    from retrofit.errors import RetrofitError, UsageError
    from retrofit.export import export_onnx, fold
    from retrofit.export.bake import bake
    from retrofit.export.plain import plain
    from retrofit.finetune.batch_statistics import sync_norms
    from retrofit.finetune.running_statistics import freeze_norms, recentre, update_bn
    from retrofit.networks.artifact import load, save
    from retrofit.networks.hub import push_to_hub, save_for_hub
    from retrofit.surgery import convert, plan, set_strength, strength_of

_HOME = {
    "convert": "retrofit.surgery",
    "plan": "retrofit.surgery",
    "set_strength": "retrofit.surgery",
    "strength_of": "retrofit.surgery",
    "load": "retrofit.networks.artifact",
    "save": "retrofit.networks.artifact",
    "push_to_hub": "retrofit.networks.hub",
    "save_for_hub": "retrofit.networks.hub",
    "export_onnx": "retrofit.export",
    "fold": "retrofit.export",
    "plain": "retrofit.export.plain",
    "bake": "retrofit.export.bake",
    "freeze_norms": "retrofit.finetune.running_statistics",
    "recentre": "retrofit.finetune.running_statistics",
    "sync_norms": "retrofit.finetune.batch_statistics",
    "update_bn": "retrofit.finetune.running_statistics",
    "RetrofitError": "retrofit.errors",
    "UsageError": "retrofit.errors",
}

__all__ = [
    "RetrofitError",
    "UsageError",
    "__version__",
    "bake",
    "callbacks",
    "convert",
    "export_onnx",
    "fold",
    "freeze_norms",
    "layers",
    "load",
    "plain",
    "plan",
    "push_to_hub",
    "recentre",
    "save",
    "save_for_hub",
    "set_strength",
    "strength_of",
    "sync_norms",
    "update_bn",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first asked for."""
    if name in ("callbacks", "layers"):
        return importlib.import_module(f"retrofit.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
