"""ONNX Runtime, imported without PyTorch; every module of ortflow that needs it imports it from here.

In the training wheel, `import onnxruntime` searches for its PyTorch front end. `onnxruntime.training` can still be
imported later.
"""

from __future__ import annotations

from ortflow.workflow.system.imports import without_package

with without_package("onnxruntime.training"):
    import onnxruntime
    from onnxruntime.capi import _pybind_state as native

__all__ = ["native", "onnxruntime"]
