"""The paths of a run file: what each is relative to, and whether it exists.

`resolve_paths` and `run_directory` are pure; only `check_files` accesses the disk, and launchers whose files are
elsewhere do not call it.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir, relocated
from ortflow.workflow.spec.backends import sections_of
from ortflow.workflow.spec.launcher_options import Keys
from ortflow.workflow.spec.locations import url_of
from ortflow.workflow.spec.model import WeightedSum
from ortflow.workflow.spec.problem import KeyPath, Problem, printable
from ortflow.workflow.spec.run import RunSpec

START = ("model", "start_from", "path")
INPUTS: tuple[tuple[str, ...], ...] = (
    ("program", "script"),
    ("model", "path"),
    START,
    ("model", "graphs", "train"),
    ("model", "graphs", "eval"),
    ("model", "graphs", "optimizer"),
    ("model", "loss", "class_weights"),
    ("model", "loss", "teacher"),
    ("data", "train", "path"),
    ("data", "eval", "path"),
    ("data", "train", "text", "tokenizer"),
    ("data", "eval", "text", "tokenizer"),
)
"""Files that a run reads: relative to the run file's folder."""

OUTPUTS: tuple[tuple[str, ...], ...] = (
    ("checkpoint", "directory"),
    ("monitor", "tensorboard_directory"),
    ("export", "path"),
)
"""Files that a run writes: relative to the run directory."""


_FILES = {"model": "ONNX file", "program": "Python file"}
"""Section -> what its path must be, and not a folder."""


def run_directory(spec: RunSpec, cwd: Path) -> Path:
    """The absolute run directory: `run_dir` or runs/NAME, relative to the current folder."""
    return Path(_absolute(spec.run_dir or f"runs/{spec.name}", cwd))


def resolve_paths(spec: RunSpec, run_file: Path, cwd: Path | None = None) -> RunSpec:
    """The same run with absolute paths; `cwd` is what `run_dir` is relative to. Idempotent."""
    cwd = Path.cwd() if cwd is None else cwd
    for place in (cwd, run_file, Path(spec.run_dir or "")):
        refuse_undecodable(place)
    home = Path(_absolute(str(run_file), cwd)).parent
    root = run_directory(spec, cwd)
    values = spec.model_dump()
    values["run_dir"] = str(root)
    for keys, base in [(keys, home) for keys in input_keys(spec)] + [(keys, root) for keys in OUTPUTS]:
        holder = _holder(values, keys)
        if holder is not None and holder.get(keys[-1]) is not None:
            value = holder[keys[-1]]
            absolute = [_absolute(path, base) for path in _listed(value)]
            holder[keys[-1]] = absolute if isinstance(value, list) else absolute[0]
    sections = values.get("data") or {}
    for data in (*sections.values(), *sections.get("eval_sets", {}).values()):
        for transform in data["transforms"] if isinstance(data, dict) and "transforms" in data else ():
            if transform["onnx"] is not None:
                transform["onnx"] = _absolute(transform["onnx"], home)
            file, _, name = (transform["function"] or "").rpartition(":")
            if file.endswith(".py"):
                transform["function"] = f"{_absolute(file, home)}:{name}"
    if values["program"] is not None:
        values["program"]["cwd"] = _absolute(values["program"]["cwd"] or ".", home)
    return type(spec).model_validate(values)


def refuse_undecodable(path: Path) -> None:
    """Raise UserError if a path is not UTF-8: run files and records cannot contain it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{printable(str(path))} is not UTF-8, which run files require", fix="rename the folder"
        ) from None


def moved(spec: RunSpec, root: Path) -> RunSpec:
    """The run of a directory that may have been moved or copied: its outputs are still inside the directory. Pure."""
    old = spec.run_dir
    if old is None or Path(old) == root:
        return spec
    values = spec.model_dump()
    values["run_dir"] = str(root)
    for section, key in OUTPUTS:
        values[section][key] = relocated(values[section][key], old, root)
    return type(spec).model_validate(values)


def make_outputs_relative(values: dict[str, Any], root: str) -> None:
    """Make outputs below `root` relative to it again: for a resolved run file that gets another run_dir."""
    for section, key in OUTPUTS:
        holder = values.get(section)
        path = holder.get(key) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(path, str) and Path(path).is_relative_to(root):
            holder[key] = os.path.relpath(path, root)


def check_files(spec: RunSpec) -> list[Problem]:
    """Input files of a run with resolved paths that do not exist; if `prepare` creates them, this is not a problem."""
    return list(_check_files(spec))


def _check_files(spec: RunSpec) -> Iterator[Problem]:
    values = spec.model_dump()
    for keys in own_inputs(spec):
        holder = _holder(values, keys)
        if holder is None or (keys == START and _has_begun(spec)):
            continue
        for path in _listed(holder.get(keys[-1])):
            yield from _check_file(spec, keys, path)
    if spec.program is not None and spec.program.cwd is not None and not os.path.isdir(spec.program.cwd):
        message = f"there is no folder {printable(spec.program.cwd)}"
        yield Problem(("program", "cwd"), message, "correct the path", others=(("program", "script"),))


def _check_file(spec: RunSpec, keys: Keys, path: str) -> Iterator[Problem]:
    shown = printable(path)
    if keys[0] == "data":
        # A file's own name may contain brackets: only what does not exist is a pattern.
        matching = not os.path.exists(path) and glob.has_magic(path) and glob.glob(path, recursive=True)
        if matching or url_of(path) is not None:
            return
    if not os.path.exists(path):
        if not spec.prepare:
            fix = "correct the path, or set a `prepare` command that creates it"
            yield Problem(numbered(keys), f"there is no file {shown}", fix)
    elif keys[0] in _FILES and keys != START and os.path.isdir(path):
        yield Problem(numbered(keys), f"{shown} is a folder", f"give the path of the {_FILES[keys[0]]}")
    elif not os.access(path, os.R_OK):
        yield Problem(numbered(keys), f"{shown} is not readable", "change its permissions")


def numbered(keys: Keys) -> KeyPath:
    """The key path of an input file, with its places in lists as numbers. Pure."""
    return tuple(int(key) if keys[0] == "model" and key.isdecimal() else key for key in keys)


def value_at(values: Any, keys: Keys) -> str | list[str] | None:
    """The path or paths of an input in a run's values; None without one. Pure."""
    holder = _holder(values, keys)
    return None if holder is None else holder.get(keys[-1])


def _has_begun(spec: RunSpec) -> bool:
    """Whether the run keeps a copy of the weights that it started with."""
    return spec.run_dir is not None and (RunDir(Path(spec.run_dir)).graphs / "start_from.json").is_file()


def own_inputs(spec: RunSpec) -> list[Keys]:
    """The keys that name input files, except those of launchers' sections; of a list, a number in text. Pure."""
    sets = spec.data.eval_sets if spec.data is not None else {}
    lists: list[Keys] = []
    if spec.model is not None:
        lists += [("model", "metrics", str(place), "path") for place in range(len(spec.model.metrics))]
        terms = spec.model.loss.terms if isinstance(spec.model.loss, WeightedSum) else ()
        lists += [("model", "loss", "terms", str(place), "loss", "teacher") for place in range(len(terms))]
    paths = (("path",), ("text", "tokenizer"))
    return [*INPUTS, *lists, *(("data", "eval_sets", name, *keys) for name in sets for keys in paths)]


def input_keys(spec: RunSpec) -> list[Keys]:
    """The keys that name input files, including those of launchers' sections. Pure."""
    sections = sections_of(spec.backends)
    return [
        *own_inputs(spec),
        *((*section_path, *keys) for section_path, section in sections for keys in section.input_keys()),
    ]


def input_files(spec: RunSpec) -> list[str]:
    """The input files of model and sets, in the order of `INPUTS`. Pure."""
    values = spec.model_dump()
    holders = ((_holder(values, keys), keys[-1]) for keys in own_inputs(spec))
    paths = [path for holder, key in holders if holder is not None for path in _listed(holder.get(key))]
    sets = [spec.data.train, spec.data.eval, *spec.data.eval_sets.values()] if spec.data is not None else []
    paths += [
        transform.onnx
        for data in sets
        if data is not None
        for transform in data.transforms
        if transform.onnx is not None
    ]
    return [path for path in paths if url_of(path) is None]


def _listed(value: str | list[str] | None) -> list[str]:
    """The paths of a key that takes one or several."""
    return [value] if isinstance(value, str) else value or []


def _absolute(path: str, base: Path) -> str:
    """`path` relative to `base`, with `~/` expanded; links are not resolved. URLs remain as they are."""
    if (url := url_of(path)) is not None:
        return url
    if path == "~" or path.startswith("~/"):
        path = os.path.expanduser(path)
    return os.path.abspath(base / path)


def _holder(values: Any, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """The mapping that contains the last of `keys`, if the sections around it exist and it may be a path."""
    for key in keys[:-1]:
        if isinstance(values, list):
            values = values[int(key)] if key.isdecimal() and int(key) < len(values) else None
        else:
            values = values.get(key) if values is not None else None
    return values if isinstance(values, dict) and _are_paths(values.get(keys[-1])) else None


def _are_paths(value: object) -> bool:
    """Whether a value may be a path or several; `model.loss.class_weights` may also be numbers."""
    return isinstance(value, str | None) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
