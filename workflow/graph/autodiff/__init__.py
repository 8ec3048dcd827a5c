"""Reverse-mode differentiation of ONNX graphs. The entry point is `reverse.differentiate`; each operator has one rule,
in `operators`.

A rule writes nodes of ONNX's domain, and of com.microsoft where ONNX Runtime has a gradient operator that the rest of
the package also knows. `compose` replaces those by standard operators where the installed runtime has no kernel for
them.
"""
