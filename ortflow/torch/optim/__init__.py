"""Optimizers with ortflow's multi-tensor kernels, on parameters where they are.

In place of `onnxruntime.training.optim`; see docs/ortmodule.md.
"""

from ortflow.torch.optim.fp16_optimizer import FP16_Optimizer
from ortflow.torch.optim.fused_adam import AdamWMode, FusedAdam
from ortflow.torch.optim.lamb import Lamb
from ortflow.torch.optim.sgd import SGD

__all__ = ["SGD", "AdamWMode", "FP16_Optimizer", "FusedAdam", "Lamb"]
