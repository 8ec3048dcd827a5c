"""Operator domains used in graphs beside ONNX's own. Must not import anything."""

MICROSOFT = "com.microsoft"
"""ONNX Runtime's operators."""
CPU_DOMAIN = "ortflow"
"""Our CPU operators: `ortflow.workflow.kernels`."""
CUDA_DOMAIN = "ortflow.cuda"
"""Our GPU operators: `ortflow.workflow.cuda`."""
