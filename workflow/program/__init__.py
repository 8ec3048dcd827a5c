"""Training programs that are not ONNX graphs: how a rank starts, serves, stops and records one."""
