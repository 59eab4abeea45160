"""Export: a network folded for inference, as a PyTorch module or as an ONNX file that is checked
against PyTorch.
"""

from retrofit.utils.extras import lazy_names

# Folding needs no package of ONNX.
__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
