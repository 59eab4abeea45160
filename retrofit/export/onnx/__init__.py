"""The ONNX file: made by torch's exporter, compared with PyTorch, written whole."""
