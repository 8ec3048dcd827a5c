"""While MPI starts, memory that it allocates is zeroed, whatever the heap held before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from ortflow.workflow.comm.fresh_memory import fresh_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
SIZES = range(64, 1033, 16)

def fill():
    blocks = [(libc.malloc(size), size) for size in SIZES for _ in range(21)]
    for block, size in blocks:
        ctypes.memset(block, 0x41, size)
    for block, _ in blocks[::3]:
        libc.free(block)

def dirty():
    found = {size: ctypes.string_at(libc.malloc(size), size) for size in SIZES}
    return [size for size, content in found.items() if b"A" * 32 in content]

fill()
with fresh_memory():
    print(dirty())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap")
def test_no_block_has_old_content() -> None:
    assert found(PMI_FD="3", SLURM_STEP_ID="0") == "[]"
    assert len(found()) > 100, "outside a step of srun the heap is unchanged"


def found(**variables: str) -> str:
    """The sizes of blocks that had old content."""
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()
