"""Writes one model file from the stages of a pipeline that are in several files. Called by `ortflow join`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.stages.join import join
from ortflow.workflow.rundir import write_atomically

_LARGEST = 1 << 31
"""Largest size of a protobuf message, in bytes."""


def join_files(stages: Sequence[Path], output: Path) -> list[list[str]]:
    """Write the joined model to `output`, which must not exist. Returns the tensors between its stages.

    Raises
    ------
    UserError
        If a file is not a model, the stages do not fit together, or `output` exists.
    """
    if os.path.lexists(output):
        raise UserError("exists and is not replaced", where=str(output), fix="choose another path, or remove it")
    whole, cuts = join([read_model(path) for path in stages])
    if whole.ByteSize() >= _LARGEST:
        raise UserError(
            "the stages together are larger than 2 GiB, which no ONNX file is",
            where=str(output),
            fix="export the whole model, and name the tensors between the stages under parallel.cuts",
        )
    write_atomically(output, whole.SerializeToString(deterministic=True))
    return cuts
