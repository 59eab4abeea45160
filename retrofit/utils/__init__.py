"""Small tools that the other folders share."""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, Iterable[str]], packages: Iterable[str] = ()) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports public names when they are first used: no timm, no onnx before.

    `homes` lists the names by the module, relative to the package, that has them; `packages` are submodules.
    """
    places = {name: f"{module}:{name}" for module, names in homes.items() for name in names}
    places |= {name: name for name in packages}

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return pkgutil.resolve_name(f"{package}.{places[name]}")

    return get
