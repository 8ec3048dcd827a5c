"""ONNX Runtime sessions as ranks run them."""
