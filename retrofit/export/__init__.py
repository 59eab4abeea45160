"""Export: a network folded for inference, as a PyTorch module or as an ONNX file that is checked
against PyTorch.
"""

import lazy_loader

# Folding needs no package of ONNX.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
