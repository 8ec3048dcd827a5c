"""CUDA's libraries as pip or the system installed them: which CUDA, and loading them. Loads nothing when imported."""

from __future__ import annotations

import contextlib
import functools
import io


@functools.cache
def major() -> str:
    """The CUDA that the installed ONNX Runtime was built with: 13; empty where it was built without."""
    from ortflow.workflow.onnx_runtime import onnxruntime

    return str(getattr(onnxruntime, "cuda_version", "") or "").split(".")[0]


@functools.cache
def preload() -> str:
    """Load CUDA's libraries and cuDNN, as pip installed them or as the system has them; what was said of missing ones.

    From then on each is found by its name alone: by ctypes, and by ONNX Runtime.
    """
    from ortflow.workflow.onnx_runtime import onnxruntime

    # It raises nothing for a library that it does not find, and prints a line.
    with contextlib.redirect_stdout(io.StringIO()) as said:
        onnxruntime.preload_dlls()
    return " ".join(said.getvalue().split())
