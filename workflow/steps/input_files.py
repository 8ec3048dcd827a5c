"""The content of the files that a run reads besides its sets, so that no attempt continues with others unnoticed.

Called by step `configure`. Others compare the samples of the training set, the weights that a run starts with, and the
graph that is made of the model. Of a function, the file that defines it counts, and not what that file imports.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.graph_hashes import hash_of
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.file.paths import START, numbered, own_inputs, value_at
from ortflow.workflow.spec.locations import url_of
from ortflow.workflow.spec.problem import dotted
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report

NOT_TRAINED_ON = ("model.metrics", "data.eval")
"""Beginnings of the keys whose files only evaluations read."""
_FIX = (
    "restore it, start from the beginning with --fresh or another name (name=NAME), or accept another curve with "
    "checkpoint.exact=false"
)
_ELSEWHERE = (("model", "path"), START)


def input_hashes(spec: TrainerRunSpec) -> dict[str, str]:
    """Key path -> size and hash of its file, for the files that exist."""
    return {key: hash_of(Path(path)) for key, path in _files(spec) if os.path.isfile(path)}


def refuse_other_files(
    before: Mapping[str, str], now: Mapping[str, str], spec: TrainerRunSpec, report: Report, *, saved: bool
) -> None:
    """Raise UserError if a run would continue from a checkpoint with another file; warn if it starts again.

    `before` and `now` are hashes by key. Files of evaluations may change with a warning, as may all without
    `checkpoint.exact`.
    """
    files = dict(_files(spec))
    for key in sorted(key for key in before.keys() & now.keys() if before[key] != now[key]):
        message = f"{files[key]} has changed since this run began"
        if key.startswith(NOT_TRAINED_ON):
            report.warn(f"{key}: {message}: later evaluations are not comparable with earlier ones")
        elif saved and spec.checkpoint.exact:
            raise UserError(f"{message}: the loss curve would change", where=key, fix=_FIX)
        else:
            report.warn(f"{key}: {message}")


def _files(spec: TrainerRunSpec) -> Iterator[tuple[str, str]]:
    values = spec.model_dump()
    for keys in own_inputs(spec):
        path = None if keys in _ELSEWHERE or (keys[0] == "data" and keys[-1] == "path") else value_at(values, keys)
        if isinstance(path, str) and url_of(path) is None:
            yield dotted(numbered(keys)), path
    yield from _of_transforms("data.train", spec.data.train)
    yield from _of_transforms("data.eval", spec.data.eval)
    for name, section in spec.data.eval_sets.items():
        yield from _of_transforms(f"data.eval_sets.{name}", section)


def _of_transforms(section_path: str, section: DataSet | None) -> Iterator[tuple[str, str]]:
    for number, transform in enumerate(section.transforms if section is not None else ()):
        place = f"{section_path}.transforms[{number}]"
        if transform.onnx is not None:
            yield f"{place}.onnx", transform.onnx
        if transform.function is not None:
            module, _, _ = transform.function.rpartition(":")
            path = module if module.endswith(".py") else _origin(module)
            if path is not None:
                yield f"{place}.function", path


def _origin(module: str) -> str | None:
    """The file of a module; None if there is none, which the transform reports."""
    try:
        description = importlib.util.find_spec(module)
    except Exception:  # noqa: BLE001 - a parent package is imported, whose code may raise anything
        return None
    return None if description is None else description.origin
