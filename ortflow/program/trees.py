"""State as nested dictionaries and lists, taken apart into tensors and the rest, and put together again."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class TensorPlace(NamedTuple):
    """Stands in a tree for a tensor that is stored elsewhere, under `key`."""

    key: str
    shape: tuple[int, ...]
    dtype: Any
    device: str


def replace(tree: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a copy of the tree with `change(path, leaf)` in place of each leaf."""
    if isinstance(tree, TensorPlace):
        return change(path, tree)
    if isinstance(tree, dict):
        result = {} if type(tree) is dict else copy.copy(tree)
        for key, value in tree.items():
            result[key] = replace(value, change, f"{path}.{_text(key)}" if path else _text(key))
        return result
    if isinstance(tree, (list, tuple)):
        items = [replace(value, change, f"{path}.{number}") for number, value in enumerate(tree)]
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*items)
        return items if type(tree) is list else tuple(items) if type(tree) is tuple else copy.copy(tree)
    return change(path, tree)


def _text(key: Any) -> str:
    """A key of a dictionary as a part of a path. The order of a set of strings is not the same in two processes."""
    if isinstance(key, frozenset):
        return f"frozenset({', '.join(sorted(_text(item) for item in key))})"
    return str(key)


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf."""
    collected: list[tuple[str, Any]] = []
    replace(tree, lambda path, leaf: collected.append((path, leaf)))
    return iter(collected)


def digest(tree: Any) -> str:
    """Return a digest of a tree's structure and its leaves without tensors: equal for equal values."""
    summary = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(tree):
        if leaf is None or isinstance(leaf, (int, float, str, bytes, TensorPlace)):
            summary.update(f"{path}={leaf!r}\n".encode())
        else:
            summary.update(_pickled((path, leaf)))
    return summary.hexdigest()


def _pickled(value: Any, around: frozenset[int] = frozenset()) -> bytes:
    """Pickle a value, the same for equal values; `around` has the ids of the sets that contain it."""
    try:
        return _dump(value, around, fast=True)
    except (ValueError, RecursionError):  # it contains itself
        return _dump(value, around, fast=False)


def _dump(value: Any, around: frozenset[int], *, fast: bool) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, around)
    # Two equal strings and one string twice are equal values: fast, pickle does not note which objects are the same.
    pickler.fast = fast
    pickler.dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a set as its items in an order that does not depend on the seed of the hash of strings."""

    def __init__(self, file: io.BytesIO, around: frozenset[int]) -> None:
        super().__init__(file)
        self._around = around

    def persistent_id(self, value: Any) -> Any:
        """What stands for a set; None for anything else."""
        if not isinstance(value, (set, frozenset)):
            return None
        if id(value) in self._around:
            return "a set around this item"
        around = self._around | {id(value)}
        items = sorted(
            repr(item).encode() if type(item) in (int, float, str) else _pickled(item, around) for item in value
        )
        return type(value).__qualname__, items, getattr(value, "__dict__", None)
