"""Values from the command line: `train.steps=100` sets a YAML value at a key path.

Called by `load` on the document before validation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ortflow.workflow.spec.file.document import Document, parse_document
from ortflow.workflow.spec.file.shorthand import expand
from ortflow.workflow.spec.problem import COMMAND_LINE, KeyPath, Problem


def override(document: Document, assignments: Iterable[str]) -> None:
    """Set each `key.path=value`; a later one takes precedence. Errors are added to the document's problems."""
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        path = tuple(name.strip().split("."))
        if not equals or not all(path):
            message = f"{assignment!r} is not an override"
            document.problems.append(
                Problem((), message, "write key.path=value, such as train.steps=100", COMMAND_LINE)
            )
            continue
        value_document = parse_document(text, document.file)
        for problem in value_document.problems:
            document.problems.append(Problem((*path, *problem.path), problem.what, problem.fix, COMMAND_LINE))
        if not value_document.problems:
            _set(document, path, value_document.values)
            expand(document)


def _set(document: Document, path: tuple[str, ...], value: Any) -> None:
    holder = document.values
    for depth, key in enumerate(path[:-1], 1):
        if isinstance(holder.get(key), list) and path[depth].isdecimal() and int(path[depth]) < len(holder[key]):
            place = int(path[depth])
            if isinstance(holder[key][place], dict) and len(path) > depth + 1:
                inner = Document(document.file, holder[key][place], problems=document.problems)
                _set(inner, path[depth + 1 :], value)
                _forget_lines(document, (*path[:depth], place, *path[depth + 1 :]))
                return
        if holder.get(key) is None:
            _forget_lines(document, path[:depth])
            document.implied.add(path[:depth])
            holder[key] = {}
        holder = holder[key]
        if not isinstance(holder, dict):
            message = f"cannot be set, because {'.'.join(path[:depth])} has no keys"
            document.problems.append(Problem(path, message, None, COMMAND_LINE))
            return
    _forget_lines(document, path)
    document.implied.discard(path)
    holder[path[-1]] = value


def _forget_lines(document: Document, path: KeyPath) -> None:
    """Attribute everything at and under `path` to the command line."""
    for line_path in [line_path for line_path in document.lines if line_path[: len(path)] == path]:
        del document.lines[line_path]
    document.lines[path] = COMMAND_LINE
