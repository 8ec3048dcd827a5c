"""Training of PyTorch modules with ONNX Runtime, ortflow's gradients and ortflow's kernels.

In place of `onnxruntime.training.ortmodule`; see docs/ortmodule.md.
"""

from ortflow.torch.module import ORTModule
from ortflow.torch.settings import DebugOptions, LogLevel

__all__ = ["DebugOptions", "LogLevel", "ORTModule"]
