from .folding import fold
from .onnx_export import export_onnx
from .report import ExportReport

__all__ = ["ExportReport", "export_onnx", "fold"]
