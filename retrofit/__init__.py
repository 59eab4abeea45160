"""Turn a trained network into a normality-normalized or batch-independent one, with the same
outputs at the start.
"""

from retrofit.utils.extras import lazy_names

__version__ = "0.2.0"

# Neither timm nor onnx is imported before it is used.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
__all__ += ["__version__"]
