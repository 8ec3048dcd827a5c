"""How an ORTModule behaves: keywords, or the environment variables of the upstream package."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ortflow.workflow.errors import UserError

T = TypeVar("T")


class LogLevel(enum.IntEnum):
    """How much ONNX Runtime and ORTModule log."""

    VERBOSE = 0
    INFO = 1
    WARNING = 2
    ERROR = 3
    FATAL = 4


@dataclass(frozen=True)
class DebugOptions:
    """For debugging: graphs written to files, and the log level.

    With `save_onnx`, each graph is written to `$ORTMODULE_SAVE_ONNX_PATH` or the working folder as
    `<onnx_prefix>_<mode>_<number>_forward.onnx` and `…_backward.onnx`.
    """

    log_level: LogLevel = LogLevel.WARNING
    save_onnx: bool = False
    onnx_prefix: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.log_level, LogLevel):
            raise UserError(f"is {self.log_level!r}", where="DebugOptions(log_level)", fix="use a LogLevel")
        if self.save_onnx and not self.onnx_prefix:
            raise UserError("is empty", where="DebugOptions(onnx_prefix)", fix="give the graphs' files a prefix")
        if self.save_onnx and not os.access(self.folder, os.W_OK):
            raise UserError("cannot be written to", where=str(self.folder), fix="set ORTMODULE_SAVE_ONNX_PATH")

    @property
    def folder(self) -> Path:
        """Where graphs are written."""
        return Path(os.environ.get("ORTMODULE_SAVE_ONNX_PATH", "."))


@dataclass(frozen=True)
class Settings:
    """See `ORTModule`."""

    verify: bool = True
    # onnxruntime-training's default runs a module that it cannot export in PyTorch, after one warning.
    fallback: str | None = None
    memory_level: int = 0
    cache: Path | None = None
    cuda_graphs: bool = False
    debug: DebugOptions = field(default_factory=DebugOptions)


_POLICIES = {
    "FALLBACK_DISABLE": None,
    "FALLBACK_FORCE_TORCH_FORWARD": "submodule",
    "FALLBACK_FORCE_TORCH_BACKWARD": "submodule",
    "FALLBACK_UNSUPPORTED_DEVICE": None,
    "FALLBACK_UNSUPPORTED_DATA": None,
    "FALLBACK_UNSUPPORTED_TORCH_MODEL": "submodule",
    "FALLBACK_UNSUPPORTED_ONNX_MODEL": "submodule",
    "FALLBACK_BAD_INITIALIZATION": None,
}
"""Value of ORTMODULE_FALLBACK_POLICY -> `fallback`."""
_LEVELS = {"DEVINFO": LogLevel.INFO, **{level.name: level for level in LogLevel}}


def settings(
    debug: DebugOptions | None = None,
    *,
    verify: bool | None = None,
    fallback: str | None = None,
    memory_level: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    cuda_graphs: bool = False,
    variables: Mapping[str, str] = os.environ,
) -> Settings:
    """The settings: keywords, then variables, then defaults. Raises UserError."""
    debug = debug or DebugOptions()
    if not isinstance(debug, DebugOptions):
        raise UserError(f"is a {type(debug).__name__}", where="ORTModule(debug_options)", fix="pass a DebugOptions")
    if "ORTMODULE_LOG_LEVEL" in variables:
        level = _of(_LEVELS, variables, "ORTMODULE_LOG_LEVEL")
        debug = DebugOptions(level, debug.save_onnx, debug.onnx_prefix)
    if fallback is None and "ORTMODULE_FALLBACK_POLICY" in variables:
        fallback = _of(_POLICIES, variables, "ORTMODULE_FALLBACK_POLICY")
    if fallback not in (None, "error", "submodule"):
        raise UserError(f"is {fallback!r}", where="ORTModule(fallback)", fix='use "error" or "submodule"')
    option = "ORTModule(memory_level)"
    if memory_level is None and "ORTMODULE_MEMORY_OPT_LEVEL" in variables:
        option = "ORTMODULE_MEMORY_OPT_LEVEL"
        memory_level = _of({"0": 0, "1": 1, "2": 2}, variables, option)
    if memory_level not in (None, 0, 1, 2) or isinstance(memory_level, bool):
        raise UserError(f"is {memory_level!r}", where=option, fix="use 0, 1 or 2")
    if not isinstance(cuda_graphs, bool):
        raise UserError(f"is {cuda_graphs!r}", where="ORTModule(cuda_graphs)", fix="use True or False")
    if verify not in (None, True, False):
        raise UserError(f"is {verify!r}", where="ORTModule(verify)", fix="use True or False")
    if "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT" in variables:
        # Gradients are always written to memory of their own, which autograd takes over.
        _of({"0": 0, "1": 1}, variables, "ORTMODULE_ENABLE_MEM_EFFICIENT_GRAD_MGMT")
    folder = cache if cache is not None else variables.get("ORTMODULE_CACHE_DIR") or None
    return Settings(
        True if verify is None else verify,
        None if fallback == "error" else fallback,
        memory_level or 0,
        None if folder is None else Path(folder),
        cuda_graphs,
        debug,
    )


def _of(choices: Mapping[str, T], variables: Mapping[str, str], name: str) -> T:
    try:
        return choices[variables[name]]
    except KeyError:
        raise UserError(f"is {variables[name]!r}", where=name, fix=f"use {', '.join(choices)}") from None
