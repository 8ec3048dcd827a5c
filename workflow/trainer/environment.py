"""The environment of a rank of the trainer `graph`, as texts and hashes, for the record of every checkpoint."""

from __future__ import annotations

import platform
from pathlib import Path

import xxhash

from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.library import levels, library_for, source_key
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.run.recorded_environment import ASKED
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.system.runtimes import installed_runtime


def environment_of(graphs: GraphSet, kernels: str, sessions: Sessions) -> dict[str, str]:
    """The record of this rank; `kernels` is the run file's setting."""
    library = library_for(kernels)
    kernel_library = library.path if library is not None and Form.KERNELS.of(graphs.train).exists() else None
    trained = [
        graphs.train,
        Form.KERNELS.of(graphs.train),
        *([graphs.optimizer] if graphs.user_optimizer_graph else []),
    ]
    return {
        ASKED: kernels,
        "kernels": f"ortflow's ({source_key()[:8]})" if kernel_library is not None else "ONNX Runtime's",
        "package": installed_runtime(),
        "onnxruntime": onnxruntime.__version__,
        "settings": str(sessions.settings),
        "graphs": _hash(trained),
        "device": sessions.processor,
        "instructions": next(iter(levels()), platform.machine()),
        "library": _hash([kernel_library]) if kernel_library is not None else "none",
        "threads": str(sessions.threads),
    }


def _hash(files: list[Path]) -> str:
    state = xxhash.xxh3_64()
    for file in files:
        if file.exists():
            state.update(file.name.encode() + b"\0" + file.read_bytes())
    return state.hexdigest()
