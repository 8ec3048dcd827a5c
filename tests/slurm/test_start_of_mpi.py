"""The contents of a rank's memory when MPI starts must not matter: see workflow/comm/fresh_memory.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from cluster import Cluster

OLD_CONTENT = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [(libc.malloc(size), size) for size in range(48, 2048, 16) for _ in range(20)]
for block, size in blocks:
    ctypes.memset(block, 0x41, size)
for block, _ in blocks[::3]:
    libc.free(block)
"""
LATE = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
from ortflow.workflow.comm.mpi import MpiCommunicator
"""
MPICH = "MPI.Init_thread(MPI.THREAD_FUNNELED)"
OURS = "MpiCommunicator()"
SIZE = "\nprint('met', MPI.COMM_WORLD.Get_size())"


def test_old_content_in_freed_memory(cluster_of: Cluster) -> None:
    """MPICH's own start fails on such memory; if it no longer did, our workaround could go."""
    begun = time.monotonic()
    assert ranks(cluster_of, LATE + OLD_CONTENT + OURS + SIZE).count("met 4") == 4
    # A start that works takes as long as ours; one that fails may wait for ever.
    patience = max(8.0, 4 * (time.monotonic() - begun))
    assert "met 4" not in ranks(cluster_of, LATE + OLD_CONTENT + MPICH + SIZE, patience)


def ranks(cluster: Cluster, program: str, patience: float = 45.0) -> str:
    """Output of 4 ranks on 2 nodes that run a program; ranks that never connect are ended after `patience` seconds."""
    words = ["srun", "--mpi=pmi2", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    child = subprocess.Popen(
        [*words, sys.executable, "-c", program], cwd=cluster.project.folder,
        env={**os.environ, **cluster.testbed.environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return child.communicate(timeout=patience)[0]
    except subprocess.TimeoutExpired:
        child.terminate()  # srun ends its step then
        return child.communicate(timeout=120)[0]
