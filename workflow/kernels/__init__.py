"""CPU kernels: operators of the domain `ortflow`, which ONNX Runtime loads from a shared library.

`graph` inserts the operators into a training graph; `library` finds or compiles the code that computes them. For each
kind of operator, the module that inserts it and the C file that computes it have the same name.
"""
