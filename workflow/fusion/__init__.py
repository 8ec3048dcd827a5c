"""Elementwise nodes of a graph as one kernel a group, compiled for the GPU at hand by NVRTC.

`groups` finds them, `source` writes their CUDA; `ortflow.workflow.cuda` compiles and launches it.
"""
