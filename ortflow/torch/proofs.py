"""Remembers which graphs have been compared with their modules, by hash. Called by `structures`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import onnx

from ortflow import __version__
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.system.cache_folders import cache_folders

VERSION = 2
"""Of the comparison."""


def key_of(models: Iterable[onnx.ModelProto | None], kernels: str, details: Iterable[str]) -> str:
    """Identifies a traced graph, the graphs that were made of it, and what runs them."""
    key = hashlib.sha256()
    for model in models:
        key.update(b"" if model is None else hashlib.sha256(model.SerializeToString(deterministic=True)).digest())
    key.update(repr((VERSION, __version__, onnxruntime.__version__, kernels, *details)).encode())
    return key.hexdigest()


def is_proven(key: str) -> bool:
    """Whether the graph has been compared on this machine."""
    return any((place / key).exists() for place in cache_folders("ortmodule"))


def remember(key: str) -> None:
    """Remember that the comparison has passed."""
    for place in cache_folders("ortmodule"):
        with contextlib.suppress(OSError):
            write_atomically(Path(place, key), b"")
            return
