"""Export: a network folded for inference, as a PyTorch module or as an ONNX file that is checked against PyTorch."""

from retrofit.export.api import ExportReport, export_onnx, fold

__all__ = ["ExportReport", "export_onnx", "fold"]
