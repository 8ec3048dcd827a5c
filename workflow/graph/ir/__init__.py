"""Reading, changing and writing the nodes of ONNX graphs: what every other folder here is written with."""
