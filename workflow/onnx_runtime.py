"""ONNX Runtime, imported without PyTorch: every module of ortflow that needs it takes it from here.

`import onnxruntime` of the training wheel looks for its front end for PyTorch. `onnxruntime.training` can still be
imported later.
"""

from __future__ import annotations

from ortflow.workflow.hidden import hidden

with hidden("onnxruntime.training"):
    import onnxruntime
    from onnxruntime.capi import _pybind_state as native

TRAINING = hasattr(native, "GradientGraphBuilder")
"""Whether it is the training package, whose gradient builder and kernels no other has."""

__all__ = ["TRAINING", "native", "onnxruntime"]
