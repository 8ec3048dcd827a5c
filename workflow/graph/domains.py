"""Domains of the operators that stand in graphs beside ONNX's own. Must not import anything."""

MICROSOFT = "com.microsoft"
"""ONNX Runtime's."""
CPU_DOMAIN = "ortflow"
"""Ours for the CPU: `ortflow.workflow.kernels`."""
CUDA_DOMAIN = "ortflow.cuda"
"""Ours for GPUs: `ortflow.workflow.cuda`."""
