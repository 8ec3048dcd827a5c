"""Where an iterator is, read without advancing it. Called by `living`, in the user's program; standard library only."""

from __future__ import annotations

import itertools
import operator
import types
import warnings
from typing import Any

from ortflow.program.user_code import is_users

_SIZED: tuple[type, ...] = (
    type(iter([])), type(iter(())), type(iter(range(0))), type(iter("")), type(iter(b"")), type(iter({})),
    type(reversed([])), type(iter(set())),
)  # fmt: skip
_WRAPPING = (enumerate, zip, map, filter, itertools.chain, itertools.islice, itertools.cycle)


def state(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of an iterator's state, each with a suffix for its name; None for other values.

    Parts that are not numbers or text are objects that it draws from.
    """
    if isinstance(value, types.GeneratorType):
        return _of_generator(value.gi_frame)
    if isinstance(value, _SIZED):
        return [("<left>", operator.length_hint(value))]
    if isinstance(value, (itertools.count, itertools.repeat)):
        return [("<next>", repr(value))]
    if isinstance(value, _WRAPPING):
        return [(f"<part {place}>", item) for place, item in enumerate(_reduced(value))]
    if hasattr(value, "_num_yielded") and hasattr(value, "_dataset_kind"):  # of torch's DataLoader
        return [("<batches>", value._num_yielded)]
    return None


def _of_generator(frame: types.FrameType | None) -> list[tuple[str, Any]]:
    if frame is None or not is_users(frame.f_code.co_filename, frame.f_globals.get("__name__")):
        return []
    place = f"{frame.f_lineno}:{frame.f_lasti}"
    return [("<line>", place), *((f".{name}", item) for name, item in list(frame.f_locals.items()))]


def _reduced(iterator: Any) -> list[Any]:
    """What an iterator of `itertools` or a builtin one consists of; nothing where Python no longer tells (3.14)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reduced = iterator.__reduce__()
    except (TypeError, AttributeError):
        return []
    parts: list[Any] = []
    for item in reduced[1:]:
        parts += item if isinstance(item, tuple) else [item]
    return parts
