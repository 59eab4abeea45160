from .api import export_onnx
from .fold_network import fold
from .report import ExportReport

__all__ = ["ExportReport", "export_onnx", "fold"]
