"""ONNX Runtime's sessions: one set of settings per device and number of threads. Called by `structures`."""

from __future__ import annotations

import functools

from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.runtime_check.remember import runtime_here
from ortflow.workflow.sessions.session import Sessions


@functools.cache
def sessions_for(threads: int, log_level: str = "error") -> Sessions:
    """Opens sessions on the CPU with so many threads."""
    settings = runtime_here().outcome.settings
    return Sessions(CpuDevice(), threads, log_level, find_library().path, settings)
