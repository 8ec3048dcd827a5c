"""Writes one model file from the stages of a pipeline that are in several files. Called by `ortflow join`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.patterns import matches
from ortflow.workflow.graph.stages.join import Joined, join
from ortflow.workflow.run.rundir import write_atomically

_LARGEST = 1 << 31
"""Largest size of a protobuf message, in bytes."""


def join_files(stages: Sequence[Path], output: Path, untied: Sequence[str] = ()) -> Joined:
    """Write the joined model to `output`, which must not exist; `untied` as in `same_names`.

    Raises
    ------
    UserError
        If a file is not a model, the stages do not fit together, a pattern of `untied` matches no tensor that several
        of them have, or `output` exists.
    """
    if os.path.lexists(output):
        raise UserError("exists and is not replaced", where=str(output), fix="choose another path, or remove it")
    models = [read_model(path) for path in stages]
    joined = join(models, untied)
    _check_patterns(untied, joined)
    if joined.model.ByteSize() >= _LARGEST:
        raise UserError(
            "the stages together are larger than 2 GiB, which no ONNX file is",
            where=str(output),
            fix="export the whole model, and name the tensors between the stages under parallel.cuts",
        )
    write_atomically(output, joined.model.SerializeToString(deterministic=True))
    return joined


def _check_patterns(untied: Sequence[str], joined: Joined) -> None:
    names = list(dict.fromkeys(tensor.name for tensor in (*joined.tied, *(renamed.was for renamed in joined.apart))))
    for pattern in untied:
        matches(pattern, names, "--untied", "tensor that several stages have")
