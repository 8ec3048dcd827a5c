"""The C library that registers our operators with the CUDA provider; compiled once, by any C compiler."""

from __future__ import annotations

import functools
import hashlib
import shlex
from pathlib import Path

from ortflow.workflow.kernels.library import compile_to, compilers, no_library
from ortflow.workflow.system.cache_folders import cache_folders

_SOURCE = Path(__file__).parent / "operators.c"
_HEADERS = Path(__file__).parent.parent / "kernels"
_FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-w")
_SECONDS = 120


@functools.cache
def operator_library() -> tuple[Path | None, str]:
    """The compiled library, or None, and why there is none."""
    key = hashlib.sha256(repr(_FLAGS).encode() + _SOURCE.read_bytes() + (_HEADERS / "ort.h").read_bytes())
    name = f"cuda-{key.hexdigest()[:16]}.so"
    reason = no_library()
    for folder in cache_folders("kernels"):
        if (folder / name).exists():
            return folder / name, ""
    for folder in cache_folders("kernels"):
        for compiler in compilers():
            command = [*compiler, *_FLAGS, f"-I{_HEADERS}", str(_SOURCE)]
            fault = compile_to(folder / name, command, seconds=_SECONDS)
            if fault is None:
                return folder / name, ""
            reason = f"{shlex.join(compiler)} failed: {fault}"
    return None, reason
