"""Reading, changing and writing the nodes of ONNX graphs; every other folder here is built on it."""
