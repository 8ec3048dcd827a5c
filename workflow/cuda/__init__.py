"""Our operators for ONNX Runtime's CUDA provider.

Each family of operators has a module, which registers them (`registry`) and knows only `call`, one execution of a node;
`table` imports all families. `operators` connects them to a session, `nvrtc` compiles their kernels, `library` is the C
code between ONNX Runtime and Python.
"""

FUSED, FUSED_SUMS = "Fused", "FusedSums"
"""Operators of a group of elementwise nodes; the second also sums a result over its rows."""
DROPOUT = "Dropout"
"""Operator that only a group computes: see `ortflow.workflow.kernels.dropout`."""
KERNELS = ("fused", "fused_wide", "fused_flat")
"""Kernels of each fused source: for any operands; for operands whose neighbours are in lanes; and for fewer than 2^32
elements with operands that are whole tensors, scalars or runs, whose positions are cheap to compute.
"""
SUMMING = ("fused_sums", "fused_sums_flat")
"""The same of a source that also sums a result over its rows: for any operands, and like `fused_flat`."""
SUMMING_WARPS = 8
"""Warps of a block of these, as in operators.c."""
