"""Messages for pydantic's errors, each with a key path of the run file.

Called where a section is read: by `load`, and for options of the command line and of a trainer. Only this module may
depend on pydantic's error types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ortflow.workflow.spec.backends import Backends
from ortflow.workflow.spec.base import LARGEST
from ortflow.workflow.spec.file import installed
from ortflow.workflow.spec.file.help import fill
from ortflow.workflow.spec.file.keys import SectionType, choices, discriminator, every_key, follow
from ortflow.workflow.spec.file.scalars import scalar
from ortflow.workflow.spec.problem import KeyPath, Problem, dotted, listed, nearest, shown
from ortflow.workflow.spec.run import RunSpec


def problems(error: ValidationError, values: dict[str, Any], root: SectionType = RunSpec) -> list[Problem]:
    """Everything that pydantic found in the values of section `root`, one problem per key path."""
    fill(root)
    by_path: dict[KeyPath, Problem] = {}
    fitting: set[KeyPath] = set()
    typed: set[KeyPath] = set()
    for detail in error.errors(include_url=False):
        path, section, field = follow(detail["loc"], values, root)
        if path[-1:] == (_NAME,) and path[:2] == ("data", "eval_sets"):
            message = "is no name of a set: give a letter, then letters, digits, hyphens and underscores"
            by_path[path[:-1]] = Problem(path[:-1], message)
            continue
        if detail["type"] == "extra_forbidden" and len(by_path) >= HINTED:
            # What a key might be a misspelling of takes a millisecond to find.
            by_path[path] = Problem(path, "unknown key")
            continue
        problem = _problem(detail, path, section, field, _at(values, path[:-1]))
        # Of the arms of a plain union (integer or number), the last is the widest: its message is used, unless the
        # value has the type of an earlier arm (a list of numbers, or a file with them).
        if not (detail["type"] in _TYPES and path in fitting):
            by_path[problem.path] = problem
            (typed.add if detail["type"] in _TYPES else typed.discard)(problem.path)
        if detail["type"] not in _TYPES:
            fitting.add(problem.path)
    # A mapping is meant as the section of a union of a section and a list: what is wrong in it is the message.
    inner = {path[:length] for path in by_path for length in range(len(path))}
    by_path = {path: problem for path, problem in by_path.items() if not (path in typed and path in inner)}
    meant = {other for problem in by_path.values() for other in problem.others}
    return [problem for problem in by_path.values() if not (problem.what == _MISSING and problem.path in meant)]


HINTED = 200
"""Number of problems after which an unknown key has no suggestion: such a file is not a run file."""
_MISSING = "is missing"
_NAME = "[key]"
"""How pydantic ends the location of a mapping's key."""


def _at(values: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(part, int):
            values = values[part] if isinstance(values, list) and part < len(values) else None
        else:
            values = values.get(part) if isinstance(values, dict) else None
    return values


def _problem(
    detail: ErrorDetails, path: KeyPath, section: SectionType | None, field: FieldInfo | None, siblings: Any
) -> Problem:
    kind, value, context = detail["type"], detail.get("input"), detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, section, siblings)
    if kind == "missing":
        # An item that a tuple lacks is `missing`, too, at its number (pydantic 2.14).
        if isinstance(detail["loc"][-1], int):
            return Problem(path, "has too few items", _meaning(field))
        return Problem(path, _MISSING, f"add it ({_lower(field.description)})" if field and field.description else None)
    if kind in ("union_tag_not_found", "union_tag_invalid") and field is not None:
        return _wrong_choice(kind, path, value, field)
    if kind == "literal_error":
        allowed = [str(choice) for choice in _literals(field)] or [context["expected"]]
        return Problem(path, f"must be {listed(allowed)}, not {shown(value)}", _did_you_mean(value, allowed))
    if kind == "string_pattern_mismatch":
        return _wrong_text(path, value, field)
    if kind in _TYPES:
        expected, fix = _TYPES[kind]
        literals = [str(choice) for choice in _literals(field)]
        if kind == "list_type" and value not in literals and (meant := _did_you_mean(value, literals)):
            return Problem(path, f"must be {expected}, not {shown(value)}", meant)
        return Problem(path, f"must be {expected}, not {shown(value)}", fix(value))
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return Problem(path, f"must be {words} {_number(context[name])}, not {shown(value)[:60]}")
    if kind == "too_short":
        return Problem(path, f"has {context['actual_length']} items; at least {context['min_length']} are expected")
    if kind == "too_long":
        return Problem(path, f"has {context['actual_length']} items; {context['max_length']} are expected")
    return Problem(path, f"is wrong: {detail['msg']}")


def _unknown_key(path: KeyPath, section: SectionType | None, siblings: dict[str, Any]) -> Problem:
    word = str(path[-1])
    key_names = list(section.model_fields) if section is not None else []
    if of_launchers := section is not None and issubclass(section, Backends):
        key_names += sorted(installed.others().keys() - key_names)
    meant = nearest(word, key_names)
    if meant is not None:
        # If the right key is missing, a misspelling is the likely cause.
        related_keys = () if siblings.get(meant) is not None else ((*path[:-1], meant),)
        return Problem(path, "unknown key", f"did you mean {meant}?", others=related_keys)
    elsewhere = [known_path for known_path in _paths_of_keys().get(word, []) if known_path != dotted(path)]
    if elsewhere:
        return Problem(path, "unknown key", f"did you mean {listed(elsewhere)}?")
    if of_launchers:
        fix = f"installed are {', '.join(key_names)}; install its package"
        return Problem(path, "there is no launcher of this name", fix)
    return Problem(path, "unknown key", f"known here: {', '.join(key_names) or 'none'}")


@cache
def _paths_of_keys() -> dict[str, list[str]]:
    """Each key of the run file, with every path that ends with it."""
    paths: dict[str, set[str]] = {}
    for path, _ in every_key():
        paths.setdefault(path[-1], set()).add(dotted(path))
    return {word: sorted(key_paths) for word, key_paths in paths.items()}


def _wrong_choice(kind: str, path: KeyPath, value: Any, field: FieldInfo) -> Problem:
    key, allowed = discriminator(field), choices(field)
    assert key is not None
    if kind == "union_tag_not_found":
        near = nearest(key, value) if isinstance(value, dict) else None
        if near is not None and near not in ("", key):
            return Problem((*path, near), "unknown key", f"did you mean {key}?")
        return Problem((*path, key), _MISSING, f"add it: {listed(allowed)}")
    choice = value.get(key)
    return Problem((*path, key), f"must be {listed(allowed)}, not {shown(choice)}", _did_you_mean(choice, allowed))


def _wrong_text(path: KeyPath, value: Any, field: FieldInfo | None) -> Problem:
    if value == "":
        return Problem(path, "must not be empty")
    if "\0" in value:
        return Problem(path, "must not contain a NUL character")
    return Problem(path, f"cannot be {shown(value)}", _meaning(field))


def _did_you_mean(value: Any, allowed: list[str]) -> str | None:
    meant = nearest(value, allowed) if isinstance(value, str) else None
    return f"did you mean {meant}?" if meant else None


def _meaning(field: FieldInfo | None) -> str | None:
    return f"it is: {_lower(field.description)}" if field is not None and field.description else None


def _lower(description: str) -> str:
    text = " ".join(description.split()).rstrip(".")
    return text[0].lower() + text[1:] if text[1:2].islower() else text


def _literals(field: FieldInfo | None) -> tuple[Any, ...]:
    """The values of a Literal, also inside a list or an optional type."""
    literals: list[Any] = []
    waiting = [field.annotation] if field is not None else []
    while waiting:
        annotation = waiting.pop(0)
        parts = get_args(annotation)
        if parts and all(isinstance(part, str | int) for part in parts):
            literals.extend(parts)
        else:
            waiting.extend(parts)
    return tuple(literals)


def _number(value: float) -> str:
    return "2^63 - 1" if value == LARGEST else str(value)


def _nothing(_value: Any) -> str | None:
    return None


def _in_quotes(value: Any) -> str | None:
    return "put it in quotes" if isinstance(value, int | float) else None


def _as_boolean(value: Any) -> str | None:
    word = str(value).lower()
    # YAML 1.1 reads yes, on, no and off as booleans, and Helm and PyYAML still do; 1.2 and run files do not.
    if word in ("yes", "on", "y", "1"):
        return "write true"
    return "write false" if word in ("no", "off", "n", "0") else None


def _as_number(value: Any) -> str | None:
    if isinstance(value, str):
        number = scalar(value)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return f"remove the quotes: {value}"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f"write {int(value)}"
    return None


_TYPES: dict[str, tuple[str, Callable[[Any], str | None]]] = {
    "int_type": ("a whole number", _as_number),
    "int_from_float": ("a whole number", _as_number),
    "float_type": ("a number", _as_number),
    "finite_number": ("a finite number", _nothing),
    "bool_type": ("true or false", _as_boolean),
    "string_type": ("text", _in_quotes),
    "string_unicode": ("valid Unicode text", _nothing),
    "list_type": ("a list", lambda value: None if isinstance(value, dict) else f"write [{value!r}]"),
    "tuple_type": ("a list", _nothing),
    "dict_type": ("a mapping", _nothing),
    "model_type": ("a mapping", _nothing),
    "model_attributes_type": ("a mapping", _nothing),
}
"""pydantic's error type -> the expected type, and a fix for a value of another type."""

_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
