"""Documents as YAML: block style, stable to the byte. Pure.

Made for plain data without aliases; a tenth of the time that PyYAML takes. What a reader could take for something else
than text stands in quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(?:[:=,+@][A-Za-z0-9_./-]+)*")
_WORDS = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n", "nan", "inf"])


def dump(documents: Iterable[dict[str, Any]]) -> str:
    """A stream of documents."""
    lines: list[str] = []
    for document in documents:
        lines.append("---")
        _mapping(document, "", lines)
    return "".join(f"{line}\n" for line in lines)


def _mapping(values: dict[str, Any], indent: str, lines: list[str]) -> None:
    for key, value in values.items():
        begin = f"{indent}{_text(key)}:"
        if not value or not isinstance(value, dict | list):
            _plain(begin, value, indent, lines)
            continue
        lines.append(begin)
        if isinstance(value, dict):
            _mapping(value, indent + "  ", lines)
        else:
            _list(value, indent, lines)


def _list(values: list[Any], indent: str, lines: list[str]) -> None:
    for value in values:
        if not value or not isinstance(value, dict | list):
            lines.append(f"{indent}- {_scalar(value)}")
            continue
        first = len(lines)
        if isinstance(value, dict):
            _mapping(value, indent + "  ", lines)
        else:
            _list(value, indent + "  ", lines)
        lines[first] = f"{indent}- {lines[first][len(indent) + 2 :]}"


def _plain(begin: str, value: Any, indent: str, lines: list[str]) -> None:
    if isinstance(value, str) and "\n" in value and _is_block(value):
        lines.append(f"{begin} |" if value.endswith("\n") else f"{begin} |-")
        lines.extend(f"{indent}  {line}" if line else "" for line in value.removesuffix("\n").split("\n"))
    else:
        lines.append(f"{begin} {_scalar(value)}")


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, dict):
        return "{}"
    return "[]" if isinstance(value, list) else json.dumps(value)


def _is_block(text: str) -> bool:
    """Whether a text of several lines comes back from a block as it was."""
    lines = text.removesuffix("\n").split("\n")
    return (
        len(lines) > 1
        and bool(lines[0])
        and bool(lines[-1])
        and not lines[0].startswith(" ")
        and all(line.replace("\t", "").isprintable() for line in lines)
    )


@lru_cache(4096)
def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    if text.isprintable() and len(text) > 40 and '"' in text:
        return "'" + text.replace("'", "''") + "'"
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    if letter.isprintable():
        return letter
    number = ord(letter)
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(letter) or (
        f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
    )
