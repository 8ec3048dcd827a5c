"""The values of a sweep from the command line, `train.optimizer.lr=1e-3,3e-4` and `seed=1..4`, and their product.

Pure. Values remain text, which `overrides` reads like any KEY=VALUE.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.problem import printable

LIMIT = 100_000
"""Largest number of combinations of a sweep."""
_RANGE = re.compile(r"(-?\d{1,15})\.\.(-?\d{1,15})")
_WRITE = "write KEY=VALUE,VALUE or KEY=FIRST..LAST, such as train.optimizer.lr=1e-3,3e-4 or seed=1..4"
_CLOSING = {"[": "]", "{": "}"}


@dataclass(frozen=True)
class Axis:
    """A key and its values."""

    key: str
    values: tuple[str, ...]


def read_axes(texts: Sequence[str], overrides: Sequence[str] = ()) -> list[Axis]:
    """Parse `--set KEY=VALUES` texts. Raises UserError, also if a key occurs twice or in `overrides` too."""
    axes: list[Axis] = []
    count = 1
    for text in texts:
        key, equals, values = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise UserError(f"--set {printable(text)} has no key or no values", fix=_WRITE)
        for other in [axis.key for axis in axes] + [override.partition("=")[0].strip() for override in overrides]:
            if f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}."):
                message = f"{key} is given twice" if key == other else f"{key} and {other} are both given"
                raise UserError(message, fix="keep one of them")
        parts = [_part(key, part) for part in _split(key, values)]
        count *= sum(map(len, parts))
        if count > LIMIT:
            raise UserError(f"--set asks for more than {LIMIT} runs", fix="give fewer values")
        axes.append(Axis(key, tuple(str(value) for part in parts for value in part)))
        earlier_values: set[str] = set()
        for value in axes[-1].values:
            if value in earlier_values:
                raise UserError(f"{key} has the value {printable(value)} twice", fix="keep one of them")
            earlier_values.add(value)
    return axes


def combinations(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Every combination as {key: value}; the last key changes fastest."""
    for values in itertools.product(*(axis.values for axis in axes)):
        yield dict(zip((axis.key for axis in axes), values, strict=True))


def count(axes: Sequence[Axis]) -> int:
    """Number of combinations."""
    return math.prod(len(axis.values) for axis in axes)


def _part(key: str, text: str) -> Sequence[str] | range:
    """The values of one item of the list."""
    if not text:
        raise UserError(f"{key} has an empty value", fix=f"{_WRITE}; null means no value")
    match = _RANGE.fullmatch(text)
    if match is None:
        return (text,)
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise UserError(f"{key} goes from {first} to {last}, an empty range", fix=f"write {last}..{first}")
    return range(first, last + 1)


def _split(key: str, text: str) -> Iterator[str]:
    """Split at commas outside brackets and quotation marks."""
    item, quote, closing = "", "", ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        # As in YAML, a quotation mark within a plain text is a letter like others: it's.
        elif letter in "\"'" and (not item.strip() or closing):
            quote = letter
        elif letter in _CLOSING:
            closing = _CLOSING[letter] + closing
        elif closing and letter == closing[0]:
            closing = closing[1:]
        elif letter == "," and not closing:
            yield item.strip()
            item = ""
            continue
        item += letter
    if quote or closing:
        message = f"has an unclosed {quote}" if quote else f"lacks a {closing[0]}"
        raise UserError(f"{key} {message}: {printable(text)}", fix=_WRITE)
    yield item.strip()
