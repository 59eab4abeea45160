"""Export: a network folded for inference, as a PyTorch module or as an ONNX file that is checked
against PyTorch.
"""

from retrofit.export.api import export_onnx, fold
from retrofit.export.report import ExportReport

__all__ = ["ExportReport", "export_onnx", "fold"]
