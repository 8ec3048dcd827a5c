"""A run file as plain data with the line of every key.

Called only by `load`. A run file is untrusted input: no tags, no aliases (one kilobyte of them can stand for
gigabytes), no duplicate keys (YAML keeps the last one silently), limited in size and depth. Does not depend on the
keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from ortflow.workflow.spec.file.scalars import octal, scalar
from ortflow.workflow.spec.problem import Fault, KeyPath, Problem
from ortflow.workflow.system.files import open_regular

SIZE_LIMIT = 256 * 1024
# Each level is a call, as in yaml.load, which ends with a RecursionError below 900 levels (PyYAML 6.0.4).
DEPTH_LIMIT = 24


@dataclass
class Document:
    """Values, the line of each key path, and the errors of the file itself."""

    file: str
    values: Any = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    implied: set[KeyPath] = field(default_factory=set)
    """Sections that only a key set on the command line has made: their other keys are missing in the file."""

    def fault(self, problem: Problem) -> Fault:
        """The problem with its position: the line of its key, or of the nearest section around it."""
        line = problem.line
        path = problem.path
        while line is None and path:
            if path == problem.path or path not in self.implied:
                line = self.lines.get(path)
            path = path[:-1]
        return Fault(problem, self.file, line)


_NAMES_THE_MODEL = "write a run file that names it: `model: {path: ...}`; docs/run-file.md has a complete example"
_EXPORT = "export its model with ortflow.export_for_training (docs/models.md), and write a run file (docs/run-file.md)"
_PROGRAM = (
    "start it with `ortflow run`, or write its run file with `ortflow init` (docs/programs.md); "
    "to train its model as an ONNX model, export it with ortflow.export_for_training (docs/models.md)"
)
OTHER_KINDS = {
    ".py": ("a Python program", _PROGRAM),
    ".ipynb": ("a notebook", _EXPORT),
    ".onnx": ("a model", _NAMES_THE_MODEL),
    **dict.fromkeys((".pt", ".pth", ".safetensors"), ("a file of PyTorch's tensors", _EXPORT)),
    ".sh": ("a shell script", "give the YAML file that describes the run (docs/run-file.md)"),
    **dict.fromkeys(
        (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".feather", ".arrow", ".npz", ".npy"),
        ("data", "name it in a run file, `data: {train: …}`; `ortflow init MODEL --data FILE` writes one"),
    ),
}
"""Name's end of files that are given in place of a run file -> what they are, and what to do."""


def read_document(path: Path) -> Document:
    """Read and parse a run file; an unreadable file is a document with that problem."""
    if path.suffix.lower() in OTHER_KINDS and path.is_file():
        kind, fix = OTHER_KINDS[path.suffix.lower()]
        return _unread(path, f"is {kind}, not a run file", fix)
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            raw = file.read(SIZE_LIMIT + 1)
    except FileNotFoundError:
        return _unread(path, "there is no such file", "give the path of a run file")
    except IsADirectoryError:
        return _unread(path, "this is a folder", "give the path of the run file")
    except OSError as error:
        return _unread(path, f"cannot be read: {error.strerror}")
    except ValueError as error:  # a NUL in the path
        return _unread(path, f"cannot be read: {error}")
    if len(raw) > SIZE_LIMIT:
        return _unread(path, f"is larger than {SIZE_LIMIT // 1024} KiB, the limit of a run file")
    try:
        # Editors of Windows begin UTF-8 with a byte order mark, which is no part of the first key.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _unread(path, "is not UTF-8 text", "save it as UTF-8", raw.count(b"\n", 0, error.start) + 1)
    return parse_document(text, str(path))


def _unread(path: Path, message: str, fix: str | None = None, line: int | None = None) -> Document:
    return Document(str(path), problems=[Problem((), message, fix, line)])


def parse_document(text: str, file: str) -> Document:
    """Parse YAML text; its errors are in `problems`."""
    document = Document(file)
    builder = _Builder(document)
    try:
        # Not CSafeLoader: libyaml words its errors differently, so that `_hint` would not know a tab. Nor yaml.load,
        # which has neither lines nor an error for a key that is given twice (PyYAML 6.0.4).
        document.values = builder.build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        document.problems.append(Problem((), f"is not valid YAML: {error.problem}", _hint(error), line))
    # Unlike PyYAML's other errors of reading, it has no mark: its place in the text is an offset.
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        document.problems.append(Problem((), f"contains the character U+{error.character:04X}", "remove it", line))
    except _TooDeepError as error:
        document.problems.append(Problem((), f"is nested more than {DEPTH_LIMIT} levels deep", None, error.line))
    return document


def _hint(error: yaml.MarkedYAMLError) -> str | None:
    problem = error.problem or ""
    if error.context == "while scanning an alias":
        return "put text that begins with * in quotes"
    if "'\\t'" in problem:
        return "indent with spaces, not tabs"
    if "cannot start any token" in problem:
        return "put text that begins with this character in quotes"
    if "mapping values are not allowed" in problem:
        return "check the indentation, and put text that contains ': ' in quotes"
    if "could not find expected ':'" in problem:
        return "write `key: value`, with a space after the colon"
    if problem.startswith("expected <block end>"):
        return "check the indentation of this line"
    return None


class _TooDeepError(Exception):
    def __init__(self, line: int) -> None:
        self.line = line


class _Builder:
    def __init__(self, document: Document) -> None:
        self.document = document

    def build(self, events: Iterator[Event]) -> Any:
        """The value of the first and only document of the stream."""
        value, documents = None, 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._problem((), event, "contains a second YAML document", "write one run per file")
                    break
            elif isinstance(event, NodeEvent):
                value = self._node(event, events, ())
        return value

    def _node(self, event: NodeEvent, events: Iterator[Event], path: KeyPath) -> Any:
        if len(path) > DEPTH_LIMIT:
            raise _TooDeepError(_line(event))
        if isinstance(event, AliasEvent):
            fix = "write the value in full, or put the text in quotes if it begins with *"
            self._problem(path, event, f"is an alias (*{event.anchor}), which run files do not allow", fix)
            return None
        self._plain(event, path)
        if isinstance(event, MappingStartEvent):
            return self._mapping(events, path)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(events, path)
        assert isinstance(event, ScalarEvent)
        # PyYAML sets implicit[0] of plain scalars only: text in quotes or blocks stays text.
        if event.implicit[0] and (other := octal(event.value)) is not None:
            message = f"is {event.value}, which Helm and other YAML 1.1 parsers read as an octal number, {other}"
            self._problem(path, event, message, f"write {scalar(event.value)}, or {other} if the octal number is meant")
        return scalar(event.value) if event.implicit[0] else event.value

    def _mapping(self, events: Iterator[Event], path: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for event in events:
            if isinstance(event, MappingEndEvent):
                break
            if not isinstance(event, ScalarEvent):
                self._problem(path, event, "has a key that is not plain text", "write `key: value`")
                _skip(event, events)
                _skip(next(events), events)
                continue
            place = (*path, event.value)
            if place in self.document.lines:
                first = self.document.lines[place]
                self._problem(place, event, f"is given twice, here and on line {first}", "keep one of them")
                _skip(next(events), events)
                continue
            self.document.lines[place] = _line(event)
            self._plain(event, place)
            following = next(events)
            assert isinstance(following, NodeEvent)
            mapping[event.value] = self._node(following, events, place)
        return mapping

    def _sequence(self, events: Iterator[Event], path: KeyPath) -> list[Any]:
        items: list[Any] = []
        for event in events:
            if isinstance(event, SequenceEndEvent):
                break
            assert isinstance(event, NodeEvent)
            place = (*path, len(items))
            self.document.lines[place] = _line(event)
            items.append(self._node(event, events, place))
        return items

    def _plain(self, event: NodeEvent, path: KeyPath) -> None:
        """Report an anchor or a tag."""
        if event.anchor is not None:
            fix = "remove it, or put the text in quotes if it begins with &"
            self._problem(path, event, f"has an anchor (&{event.anchor}), which run files do not allow", fix)
        tag = getattr(event, "tag", None)
        if tag is not None:
            fix = "remove it, or put the text in quotes if it begins with !"
            self._problem(path, event, f"has a YAML tag ({tag}), which run files do not allow", fix)

    def _problem(self, path: KeyPath, event: Event, message: str, fix: str) -> None:
        self.document.problems.append(Problem(path, message, fix, _line(event)))


def _skip(event: Event, events: Iterator[Event]) -> None:
    """Skip the node that `event` begins."""
    depth = 0
    while True:
        if isinstance(event, MappingStartEvent | SequenceStartEvent):
            depth += 1
            if depth > DEPTH_LIMIT:
                raise _TooDeepError(_line(event))
        elif isinstance(event, MappingEndEvent | SequenceEndEvent):
            depth -= 1
        if depth == 0:
            return
        event = next(events)


def _line(event: Event) -> int:
    assert event.start_mark is not None
    return int(event.start_mark.line) + 1
