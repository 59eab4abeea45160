"""The optional dependencies: which extra of the package brings what a command needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from retrofit.errors import RetrofitError

Extra = Literal["export", "train"]


class MissingExtraError(RetrofitError, ImportError):
    """A package that an extra brings is not installed."""


@contextmanager
def needs(extra: Extra) -> Iterator[None]:
    """Name the extra where one of the imports inside fails.

    Args:
        extra: The extra of retrofit-norm that brings what is imported: `export` (onnx, onnxscript,
            onnxruntime) or `train` (accelerate, scikit-learn, matplotlib).

    Raises:
        MissingExtraError: If a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{error.name} is not installed; pip install 'retrofit-norm[{extra}]'"
        ) from None
