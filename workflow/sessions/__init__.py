"""ONNX Runtime sessions of a rank."""
