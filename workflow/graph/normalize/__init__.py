"""One form for any model: opset, precision, constants, and nothing that ONNX Runtime computes wrongly."""
