"""Kernels of our own for the CPU: operators of the domain `ortflow` that ONNX Runtime loads from a shared library.

`graph` puts them into a training graph; `library` finds or compiles what computes them. Of one kind of operator the
module that puts it there and the C file that computes it have the same name.
"""
