"""Explains NCCL's errors and warnings, and names the setting that helps. Pure; for ranks, launchers and the doctor.

NCCL has only seven error codes. The cause is in the warning before the error, which `ncclGetLastError` returns and
which a log contains if NCCL_DEBUG is WARN or INFO.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Trouble:
    """The cause of an NCCL warning, and what to do about it."""

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}; {self.fix}"


_NETWORK = "set NCCL_SOCKET_IFNAME to the interface that connects the nodes (`ip -br addr` lists them)"
_FABRIC = "check that the InfiniBand ports are up (`ibstat`), or set NCCL_IB_DISABLE=1 to use TCP"
TABLE: tuple[tuple[str, str, str], ...] = (
    # pattern, cause, what to do: the first match counts, so specific patterns come first
    (r"Duplicate GPU detected", "two ranks have the same GPU",
     "give each rank its own: lower resources.ranks_per_node to the number of GPUs of a node (slices of a GPU "
     "count as one)"),
    (r"(?:shared memory segment|failed to extend) \S*nccl.*No space left|posix_fallocate failed.*No space left",
     "/dev/shm is too small or full",
     "raise backends.kubernetes.shared_memory (docker: --shm-size=1g), remove left-over /dev/shm/nccl-* files, "
     "or set NCCL_SHM_DISABLE=1"),
    (r"shared memory segment \S*nccl|failed to extend \S*nccl",
     "the ranks of a node cannot allocate shared memory in /dev/shm",
     "raise backends.kubernetes.shared_memory (docker: --shm-size=1g --ipc=host), or set NCCL_SHM_DISABLE=1"),
    (r"no socket interface found", "no network interface fits NCCL_SOCKET_IFNAME, or there is none", _NETWORK),
    (r"NVLink SHARP|NVLS|[Mm]ulticast", "NVLink multicast is not available",
     "set NCCL_NVLS_ENABLE=0, or ask an administrator to restart nvidia-fabricmanager"),
    (r"system not yet initialized|Cuda failure 802\b", "the machine's NVSwitches are not started",
     "ask an administrator to start nvidia-fabricmanager"),
    (r"peer access is not supported|peer mapping resources|Cuda failure 217\b|P2P is disabled between NVLINK",
     "the GPUs of a node have no peer access to each other's memory", "set NCCL_P2P_DISABLE=1"),
    (r"invalid device ordinal|Cuda failure 101\b", "a rank does not see a GPU that another one has",
     "show all GPUs of a node to each rank (backends.slurm.gpu_bind: closest), or set NCCL_P2P_DISABLE=1"),
    (r"Cuda failure (?:2 )?'out of memory'", "the GPU's memory is full before NCCL has its buffers",
     "lower data.micro_batch, or NCCL_BUFFSIZE (4194304 if not set)"),
    (r"ibv_reg_mr.*(?:Cannot allocate memory|failed with error 12)|memlock",
     "memory cannot be locked for InfiniBand",
     "raise the limit (`ulimit -l unlimited`; in Kubernetes backends.kubernetes.security.capabilities: [IPC_LOCK])"),
    (r"NET/IB.*(?:Got completion|[Pp]ort error|link down)|ibv_modify_qp failed|ibv_post_|ibv_poll_cq|Call to ibv_",
     "the InfiniBand or RoCE network fails", f"{_FABRIC}; RoCE often needs NCCL_IB_GID_INDEX=3"),
    (r"Mismatched NCCL version|NCCL version mismatch", "ranks have different versions of NCCL",
     "give all nodes the same environment or image"),
    (r"Message truncated|mismatch in (?:info|rank count)|symmetric registration check",
     "ranks call different reductions", "check that all nodes have the same ortflow, run file and model"),
    (r"(?i:connect to|call to connect|socketStartConnect).*(?:No route|refused|timed out|unreachable|failed)",
     "a node cannot reach another one", f"{_NETWORK}, and open the nodes' ports in the firewall"),
    (r"Connection closed by|Connection reset|Socket recv failed|recv from \S+ failed|remote process exited",
     "another rank has ended or cannot be reached", "see the logs of the other ranks"),
    (r"driver version is insufficient", "the driver is too old for this NCCL", "update it"),
)  # fmt: skip

CODES: dict[str, str] = {
    "unhandled cuda error": "a CUDA call failed",
    "unhandled system error": "a system call failed",
    "internal error": "NCCL has an internal error, or memory is corrupt",
    "invalid argument": "NCCL was called with an invalid argument",
    "invalid usage": "NCCL was used incorrectly: ranks share a GPU, or have different settings",
    "remote process exited or there was a network error": "another rank has ended or cannot be reached",
}
"""NCCL's error strings -> their meaning."""

WARNING = re.compile(r"NCCL WARN (?P<message>.*)")
"""A warning as NCCL writes it into a log: HOST:PID:THREAD [DEVICE] FILE:LINE NCCL WARN MESSAGE."""


def trouble(message: str) -> Trouble | None:
    """The cause of one or several NCCL warnings; None if it is unknown."""
    return next((Trouble(what, fix) for pattern, what, fix in TABLE if re.search(pattern, message)), None)


def sentence(call: str, error: str, last: str = "") -> str:
    """Describe a failed NCCL call for the user.

    Parameters
    ----------
    call
        Name of the NCCL function.
    error
        Its error, from `ncclGetErrorString`.
    last
        The result of `ncclGetLastError`.
    """
    warning = " ".join(last.split())
    if (cause := trouble(warning) or trouble(error)) is not None:
        return f"NCCL failed in {call}: {cause.what} ({warning or error}); {cause.fix}"
    meaning = next((meaning for start, meaning in CODES.items() if error.startswith(start)), error)
    message = warning or error
    return f"NCCL failed in {call}: {meaning} ({message}); set NCCL_DEBUG=INFO and see the ranks' logs"


def in_log(text: str) -> Trouble | None:
    """The causes of the NCCL warnings in a rank's log; None if there are none, or none that is known."""
    warnings = "\n".join(match["message"] for match in WARNING.finditer(text))
    return trouble(warnings) if warnings else None
