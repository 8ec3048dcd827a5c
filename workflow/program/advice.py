"""What to do about errors of MPI, NCCL, CUDA and ONNX Runtime that programs print at their end. Pure.

The rows of docs/errors.md. For NCCL, the launcher also reads its warnings in the log, which say more
(`workflow/comm/nccl_messages.py`).
"""

from __future__ import annotations

import re

_TABLE: tuple[tuple[str, str], ...] = (
    # pattern, what to do: the first match counts
    (
        r"No module named '?onnxruntime\.training|cannot import name '\w*ORTModule\w*'",
        "the installed ONNX Runtime has no training front end: uninstall onnxruntime and install onnxruntime-training, "
        "or use ortflow.torch in place of ORTModule, which needs neither (docs/ortmodule.md)",
    ),
    (
        r"CUDA (?:error: )?out of memory|CUDA_ERROR_OUT_OF_MEMORY|Failed to allocate memory for requested buffer",
        "the memory of the GPU is full: lower the batch of a rank, recompute activations, or use more GPUs",
    ),
    (
        r"cannot load MPI library|libmpi\S*: cannot open shared object",
        "there is no MPI beside the program's python: `pip install mpich`, or load the site's module",
    ),
    (
        r"MPI_Init(?:_thread)?\b.*(?:fail|error|abort)|(?:Fatal error|error) in (?:internal_)?(?:P?MPI_)?Init",
        "MPI did not start: its library and the mpirun or srun --mpi that started the ranks must belong together; "
        "`ortflow doctor` tries it",
    ),
    (
        r"unhandled system error|NCCL error|ncclSystemError|ncclInternalError",
        "set NCCL_DEBUG=WARN in program.env: the cause of the next failure then includes NCCL's own",
    ),
)


def advice(text: str) -> str | None:
    """What to do about the error in a log's end; None if it is none of these."""
    return next((fix for pattern, fix in _TABLE if re.search(pattern, text)), None)
