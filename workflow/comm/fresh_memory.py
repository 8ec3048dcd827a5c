"""Fresh zeroed memory for MPI's allocations during its start.

MPICH 5.0 publishes the 4,096 bytes that begin with its UCX address, which is only a few hundred bytes long, and
abbreviates runs of zeros. Heap content after the address is therefore sent along. Through srun it uses PMI-1, and Slurm
reads at most 1,024 bytes of such a request. If freed memory with old content follows the address, a request can be
longer, and the rank ends in MPI_Init with "failed to unpack address" (MPICH: ucx_init.c, mpir_pmi.c; Slurm:
mpi/pmi2/pmi1.c).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_SIZES = (65536, 16384, 4096, *range(1032, 56, -16))
"""Bytes of the blocks that are allocated, largest first; the address is longer than the last. glibc keeps free blocks
of up to 1,032 bytes apart by size, for requests of exactly that size (tcache).
"""


@contextmanager
def fresh_memory() -> Iterator[None]:
    """Allocate the C heap's free blocks while entered, so that new ones come from the kernel and are zero.

    Does nothing outside a step of srun, and without glibc.
    """
    libc = ctypes.CDLL(None)
    if not {"PMI_FD", "SLURM_STEP_ID"} <= set(os.environ) or not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.sbrk.argtypes = [ctypes.c_ssize_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.malloc_trim(0)
    end, blocks = libc.sbrk(0), []
    try:
        for size in _SIZES:
            while (block := libc.malloc(size)) is not None and block < end:
                blocks.append(block)
            libc.free(block)
        yield
    finally:
        for block in blocks:
            libc.free(block)
