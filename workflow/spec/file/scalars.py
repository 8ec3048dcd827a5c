"""The meaning of an unquoted word of a run file: YAML 1.2's core schema, without hexadecimal and octal numbers.

PyYAML implements YAML 1.1, in which 1e-3 is text, 12:30:00 a number in base 60, `no` false and 010 eight. The reader
and the writer of run files both use this module.
"""

from __future__ import annotations

import re

Scalar = str | int | float | bool | None

_CORE: dict[str, Scalar] = {
    "null": None,
    "true": True,
    "false": False,
    ".inf": float("inf"),
    "+.inf": float("inf"),
    "-.inf": -float("inf"),
    ".nan": float("nan"),
}
_WORDS: dict[str, Scalar] = {"": None, "~": None, ".NaN": float("nan")}
for _word, _value in _CORE.items():
    _first_letter = next(letter for letter in _word if letter.isalpha())
    _capitalised = _word.replace(_first_letter, _first_letter.upper(), 1)
    _WORDS.update(dict.fromkeys((_word, _capitalised, _word.upper()), _value))

_INTEGER = re.compile(r"[-+]?[0-9][0-9_]*")
_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")


def octal(text: str) -> int | None:
    """How YAML 1.1 reads a plain scalar with a leading zero, if that is another number."""
    if _OCTAL.fullmatch(text) is None:
        return None
    other = int(text.replace("_", ""), 8)
    return other if other != scalar(text) else None


def scalar(text: str) -> Scalar:
    """The value of a plain (unquoted) scalar."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
    except ValueError:  # a stray underscore, or more digits than Python converts
        return text
    return text
