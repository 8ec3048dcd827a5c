"""Converts any model to one form: opset, precision, constants, and no operators that ONNX Runtime computes wrongly."""
