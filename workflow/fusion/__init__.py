"""Elementwise nodes of a graph as one kernel a group, compiled for the GPU at hand by NVRTC.

`groups` finds them, `source` writes their CUDA, `kernels` compiles it and gives it to the operator of fused.c.
"""

DOMAIN = "ortflow.cuda"
"""Of the operator that stands for a group."""
