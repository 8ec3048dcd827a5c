"""Convert a run file and overrides to a RunSpec, or to a list of all errors.

Called by the command line and by every rank. Opens only the run file; `files=True` also checks that model and data
exist.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.checks.program import refused_section
from ortflow.workflow.spec.file import installed, wording
from ortflow.workflow.spec.file.document import Document, parse_document, read_document
from ortflow.workflow.spec.file.overrides import override
from ortflow.workflow.spec.file.paths import check_files, make_outputs_relative, resolve_paths
from ortflow.workflow.spec.file.shorthand import expand
from ortflow.workflow.spec.problem import Fault, KeyPath, Problem, parse_dotted
from ortflow.workflow.spec.run import OF_TRAINERS, ProgramRunSpec, RunSpec, TrainerRunSpec


@dataclass(frozen=True)
class Reading:
    """The result of reading a run file: the spec if it is valid, all errors, and the lines of its keys."""

    faults: list[Fault]
    spec: RunSpec | None
    document: Document
    written: dict[str, Any] = field(default_factory=dict)
    """The values as written, with relative paths and short forms; with overrides, short forms are expanded."""

    def located(self, error: UserError) -> Fault:
        """Add file and line to an error that was found later, if `where` is one of the file's key paths."""
        path = parse_dotted(error.where or "")
        if any(line_path[:1] == path[:1] for line_path in self.document.lines if path):
            return self.document.fault(Problem(path, error.what, error.fix))
        message = error.what if error.where is None else f"{error.where}: {error.what}"
        return Fault(Problem((), message, error.fix), self.document.file, None)


def load_run_file(path: Path, overrides: Sequence[str] = (), *, files: bool = False, others: bool = True) -> RunSpec:
    """Load the run of a run file, with its paths as written. Raises Faults with all errors.

    Parameters
    ----------
    path
        The run file.
    overrides
        `key.path=value` texts.
    files
        Also check that the model and the data exist.
    others
        Whether to load the sections of launchers that are not built in. Ranks need neither them nor their packages.
    """
    reading = _checked(read_document(path), path, overrides, files=files, others=others)
    if reading.spec is None or reading.faults:
        raise Faults(reading.faults)
    return reading.spec


def load_run_text(text: str, name: str) -> RunSpec:
    """Load the run of a run file's text, which messages call `name`. Raises Faults."""
    reading = _checked(parse_document(text, name), Path(name), (), files=False)
    if reading.spec is None or reading.faults:
        raise Faults(reading.faults)
    return reading.spec


def read_run_file(path: Path, overrides: Sequence[str] = (), *, files: bool = True) -> Reading:
    """Read and check a run file; `files` also checks that the model and the data exist."""
    return _checked(read_document(path), path, overrides, files=files)


def read_values(values: dict[str, Any], file: Path, overrides: Sequence[str] = (), *, files: bool = True) -> Reading:
    """As `read_run_file`, of values that were made from the command line for `file`."""
    return _checked(Document(str(file), deepcopy(values)), file, overrides, files=files)


def _checked(document: Document, path: Path, overrides: Sequence[str], *, files: bool, others: bool = True) -> Reading:
    if not document.problems and document.values is None:
        document.problems.append(
            Problem((), "is empty", "write at least name, model, data and train, or name and program")
        )
    elif not document.problems and not isinstance(document.values, dict):
        document.problems.append(Problem((), "has no keys", "write sections such as `train:`"))
    if not isinstance(document.values, dict):
        return Reading([document.fault(problem) for problem in document.problems], None, document)
    if not others:
        for name in installed.names_in(document.values):
            del document.values["backends"][name]
    file_values = deepcopy(document.values)
    expand(document)
    resolved = document.values.get("run_dir")
    override(document, overrides)
    if isinstance(resolved, str) and os.path.isabs(resolved) and document.values.get("run_dir") != resolved:
        make_outputs_relative(document.values, resolved)
    spec, problems = _typed(document)
    if spec is not None:
        problems += [problem for problem in check(spec) if not _follows(problem, problems)]
        if files:
            missing = check_files(resolve_paths(spec, path))
            problems += [problem for problem in missing if not _follows(problem, problems)]
    faults = sorted((document.fault(problem) for problem in problems), key=lambda fault: fault.line or math.inf)
    return Reading(faults, spec, document, document.values if overrides else file_values)


def _typed(document: Document) -> tuple[RunSpec | None, list[Problem]]:
    """The spec and the errors; if there are errors, a spec with placeholders, so that the rest can be checked."""
    problems = list(document.problems)
    values, base = document.values, spec_class(document.values)
    if base is ProgramRunSpec:
        problems += [refused_section(key) for key in OF_TRAINERS if values.get(key) is not None]
        values = {key: value for key, value in values.items() if key not in OF_TRAINERS}
    kind, stand_ins = base, STAND_INS
    try:
        kind = installed.spec_type(installed.names_in(values), base)
        stand_ins = {**STAND_INS, **installed.forms(installed.names_in(values)).stand_ins}
    except UserError as error:
        path = parse_dotted(error.where or "")
        problems.append(Problem(path, error.what, error.fix))
        values = _mended(values, [path], stand_ins)
    try:
        return kind.model_validate(values), problems
    except ValidationError as error:
        type_problems = wording.problems(error, values, kind)
        problems += [p for p in type_problems if not any(_follows(p, [q]) for q in problems)]
    paths = [path for problem in problems for path in (problem.path, *problem.others)]
    values = _mended(values, paths, stand_ins)
    try:
        return kind.model_validate(values), problems
    except ValidationError:
        return None, problems


def spec_class(values: Mapping[str, Any]) -> type[RunSpec]:
    """The kind of run that a file's values describe: of a program if they have that key."""
    return TrainerRunSpec if values.get("program") is None else ProgramRunSpec


def _follows(problem: Problem, causes: Sequence[Problem]) -> bool:
    """Whether a problem may be caused by a known one."""
    return any(problem.hangs_on(path) for cause in causes for path in (cause.path, *cause.others) if path)


_LOSS = {"kind": "mse"}
_OPTIMIZER = {"name": "adamw", "lr": 1.0}
_SET = {"path": "-"}
STAND_INS: dict[KeyPath, Any] = {
    ("name",): "stand-in",
    ("program",): {"command": ["-"]},
    ("model",): {"path": "-", "loss": _LOSS},
    ("model", "path"): "-",
    ("model", "start_from", "path"): "-",
    ("model", "lora", "match"): ["*"],
    ("model", "loss"): _LOSS,
    ("model", "loss", "output"): "-",
    ("model", "loss", "other"): "-",
    ("model", "loss", "positive"): "-",
    ("model", "loss", "negative"): "-",
    ("model", "loss", "terms"): [{"loss": _LOSS}],
    ("tune", "space"): {"seed": [0]},
    ("data",): {"train": _SET, "micro_batch": 1},
    ("data", "train"): _SET,
    ("data", "train", "path"): "-",
    ("data", "eval"): _SET,
    ("data", "eval", "path"): "-",
    ("data", "train", "tokens", "length"): 1,
    ("data", "eval", "tokens", "length"): 1,
    ("data", "train", "audio", "rate"): 1,
    ("data", "eval", "audio", "rate"): 1,
    ("data", "train", "text", "tokenizer"): "-",
    ("data", "eval", "text", "tokenizer"): "-",
    ("data", "by_length", "column"): "-",
    ("data", "micro_batch"): 1,
    ("train",): {"steps": 1, "optimizer": _OPTIMIZER},
    ("train", "optimizer"): _OPTIMIZER,
    ("train", "optimizer", "lr"): 1.0,
    ("train", "average", "start"): "1 step",
    ("train", "layer_decay", "factor"): 1.0,
    ("train", "layer_decay", "layers"): ["-", "-"],
    ("monitor", "profile", "from"): 1,
    ("monitor", "profile", "to"): 1,
    **installed.forms(()).stand_ins,
}
"""Placeholders for required values that are missing or wrong. Problems that depend on them are not reported."""

CHOOSES: tuple[KeyPath, ...] = (("model", "loss", "kind"), ("train", "optimizer", "name"), ("train", "average", "name"))
"""Discriminator keys: if one is wrong, the type of its section is unknown."""


def _mended(values: Any, paths: Sequence[KeyPath], stand_ins: Mapping[KeyPath, Any]) -> Any:
    """`values` without those at `paths`; a required one is replaced by its placeholder."""
    mended = _copied(values)
    for path in paths:
        # A set with a name is omitted as a whole.
        place = path[:3] if path[:2] == ("data", "eval_sets") else path
        _mend(mended, path[:-1] if path in CHOOSES else place, stand_ins)
    return mended


def _copied(values: Any) -> Any:
    """A copy whose mappings may be changed."""
    return {key: _copied(value) for key, value in values.items()} if isinstance(values, dict) else values


def _mend(values: dict[Any, Any], path: KeyPath, stand_ins: Mapping[KeyPath, Any]) -> None:
    for depth, key in enumerate(path, 1):
        inner = values.get(key)
        if depth < len(path) and isinstance(inner, dict):
            values = inner
        elif path[:depth] in stand_ins:
            values[key] = _copied(stand_ins[path[:depth]])
            return
        else:
            values.pop(key, None)
            return
