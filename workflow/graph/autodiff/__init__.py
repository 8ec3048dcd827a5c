"""Reverse-mode differentiation of ONNX graphs: `reverse.differentiate` is the entry, one rule stands for one operator.

A rule writes nodes of ONNX's own domain, and of com.microsoft where ONNX Runtime's gradient operators have names that
the rest of the package knows; `compose` writes those out where the installed runtime has no kernel of them.
"""
