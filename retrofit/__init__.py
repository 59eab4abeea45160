"""Turn a trained network into a normality-normalized or batch-independent one, with the same
outputs at the start.
"""

from typing import Any

import lazy_loader

from retrofit.utils.extras import named_extra

__version__ = "0.2.0"

# Neither timm nor onnx is imported before it is used.
_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; an extra that it needs is named.

    Raises:
        MissingExtraError: If a package is missing that an extra brings.
    """
    try:
        return _attribute(name)
    except ModuleNotFoundError as error:
        raise named_extra(error) from None
