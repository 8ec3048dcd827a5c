"""Fuses elementwise nodes into kernels, compiled by NVRTC for the present GPU.

`groups` finds the groups, `source` writes their CUDA code; `ortflow.workflow.cuda` compiles and launches it.
"""
