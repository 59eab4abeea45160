"""Small tools that the other folders share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Collection[str]], packages: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports public names when they are first used: no timm, no onnx before.

    `homes` lists the names by the module, relative to the package, that has them; `packages` are submodules.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def get(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
