"""Turn a trained network into a normality-normalized or batch-independent one, with the same
outputs at the start.
"""

import lazy_loader

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(
    __name__, __file__
)  # no timm, no onnx before they are used
__all__ += ["__version__"]
