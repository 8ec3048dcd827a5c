"""Nodes of our own on ONNX Runtime's CUDA provider.

`operators` ties them to a session, `nvrtc` compiles what they launch, `library` is the C between ONNX Runtime and us.
Each family of operators has a module; `table` names them all. Only GPUs need any of it.
"""

KERNELS = ("fused", "fused_wide", "fused_flat")
"""Kernels of each fused source: for any operands; for operands whose neighbours lie in lanes; and for those of fewer
than 2^32 elements that are whole tensors, scalars or runs, whose places take few instructions."""
