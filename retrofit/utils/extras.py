"""The optional dependencies: which extra of the package brings what is missing."""

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
