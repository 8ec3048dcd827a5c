"""State as nested dictionaries and lists, taken apart into tensors and the rest, and put together again."""

from __future__ import annotations

import copy
import hashlib
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
            result[key] = replace(value, change, f"{path}.{key}" if path else str(key))
        return result
    if isinstance(tree, (list, tuple)):
        items = [replace(value, change, f"{path}.{number}") for number, value in enumerate(tree)]
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return type(tree)(*items)
        return items if type(tree) is list else tuple(items) if type(tree) is tuple else copy.copy(tree)
    return change(path, tree)


def leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf."""
    collected: list[tuple[str, Any]] = []
    replace(tree, lambda path, leaf: collected.append((path, leaf)))
    return iter(collected)


def digest(tree: Any) -> str:
    """Return a digest of a tree's structure and its leaves without tensors: equal for equal values."""
    summary = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(tree):
        plain = leaf is None or isinstance(leaf, (int, float, str, bytes, TensorPlace))
        summary.update(f"{path}={leaf!r}\n".encode() if plain else pickle.dumps((path, leaf)))
    return summary.hexdigest()
