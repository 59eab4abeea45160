"""The optional dependencies: which extra of the package brings what is missing."""

from collections.abc import Callable
from typing import Any

import lazy_loader

from retrofit.errors import RetrofitError

# The module that an import names, and the extra that installs it.
EXTRAS = {
    "onnx": "export",
    "onnx_ir": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "accelerate": "train",
    "matplotlib": "train",
    "sklearn": "train",
}


class MissingExtraError(RetrofitError, ImportError):
    """A package that an extra brings is not installed."""


def named_extra(error: Exception) -> Exception:
    """Return the error that names the extra to install, or the error itself where none brings it.

    Args:
        error: What an import raised.

    Returns:
        A `MissingExtraError` for a module of `EXTRAS`, else `error`.
    """
    if not isinstance(error, ModuleNotFoundError):
        return error
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return error
    return MissingExtraError(
        f"{module} is not installed; pip install 'retrofit-norm[{EXTRAS[module]}]'"
    )


def lazy_names(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package that imports its public names,
    those of the stub beside `file`, when they are first used.

    Its `__getattr__` raises a `MissingExtraError` if a package is missing that an extra brings.
    """
    attribute, names, public = lazy_loader.attach_stub(package, file)

    def name_or_advice(name: str) -> Any:
        """Return what has the name; raise a `MissingExtraError` where an extra brings it."""
        try:
            return attribute(name)
        except ModuleNotFoundError as error:
            raise named_extra(error) from None

    return name_or_advice, names, public
