"""NCCL by ctypes: where it is installed, and the types and numbers of its functions."""

from __future__ import annotations

import ctypes
import glob
import site
from collections.abc import Sequence
from typing import Any

from ortflow.workflow.errors import CommunicationError

TYPES = {"float16": 6, "float32": 7, "float64": 8, "int64": 4}
"""numpy's names -> ncclDataType_t."""
BFLOAT16 = 9
"""The same of what numpy has no name for."""
BYTE = 1
"""ncclUint8."""
SUM, MAX = 0, 2
"""ncclRedOp_t."""
GRAPH_COLLECTIVES: Sequence[tuple[Any, ...]] = (
    ("ncclAllReduce", SUM), ("ncclAllReduce", MAX), ("ncclAllGather",), ("ncclReduceScatter", SUM),
)  # fmt: skip
"""By the kind of a graph's collective: the function, and what it reduces by."""
IN_PROGRESS = 7
"""ncclResult_t of a communicator that has not finished to connect."""
_UNSET = -(2**31)
"""NCCL_CONFIG_UNDEF_INT."""


class NcclError(CommunicationError):
    """An NCCL call that failed."""


class UniqueId(ctypes.Structure):
    """ncclUniqueId: passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17. Later versions recognise it by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cluster", ctypes.c_int),
        ("least_blocks", ctypes.c_int),
        ("most_blocks", ctypes.c_int),
        ("network", ctypes.c_char_p),
    )

    @classmethod
    def blocking_calls(cls, most_blocks: int | None = None) -> Config:
        """Each call returns when it has queued its work.

        `most_blocks`: thread blocks of a kernel, each of which takes a multiprocessor; None leaves them to NCCL.
        """
        # Without this NCCL starts a thread for each call: 50 us.
        return cls(
            ctypes.sizeof(cls), 0xCAFEBEEF, 21700, 1, _UNSET, _UNSET, _UNSET if most_blocks is None else most_blocks
        )


def load() -> Any | None:
    """NCCL as installed by pip, else the system's; None if there is none."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    installed = [path for folder in folders for path in glob.glob(f"{folder}/nvidia/nccl/lib/libnccl.so.2")]
    for path in (*installed, "libnccl.so.2"):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
        return library
    return None
