"""Turn a trained network into a normality-normalized or batch-independent one, with the same outputs at the start."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrofit import layers
    from retrofit.artifact import load, save
    from retrofit.errors import RetrofitError, UsageError
    from retrofit.export import export_onnx, fold
    from retrofit.surgery import convert, plan, set_strength

__version__ = "0.1.0"

_HOME = {
    "convert": "retrofit.surgery",
    "plan": "retrofit.surgery",
    "set_strength": "retrofit.surgery",
    "load": "retrofit.artifact",
    "save": "retrofit.artifact",
    "export_onnx": "retrofit.export",
    "fold": "retrofit.export",
    "RetrofitError": "retrofit.errors",
    "UsageError": "retrofit.errors",
}

__all__ = [
    "RetrofitError",
    "UsageError",
    "__version__",
    "convert",
    "export_onnx",
    "fold",
    "layers",
    "load",
    "plan",
    "save",
    "set_strength",
]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first asked for."""
    if name == "layers":
        return importlib.import_module("retrofit.layers")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
