"""Attributes of a module as values that can be compared: equal ones lead to equal graphs. Called by `watch`."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable
from typing import Any

import torch

_LARGEST = 1000
"""Items of a container beyond which it counts as one object: a vocabulary, a data set."""
_DEEPEST = 6
_SIMPLE = (bool, int, str, bytes, type(None), complex, torch.dtype, torch.device)
_WITHOUT_STATE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
Holders = list[Any]


@dataclasses.dataclass(frozen=True)
class Same:
    """An object that equals itself only; it lives as long as this, so that no other gets its identity."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def comparable(value: Any, holders: Holders, tensors: list[torch.Tensor], depth: int = 0) -> Hashable:
    """A value by its content if it is plain, and else by its identity.

    `holders` gets the containers, and the namespaces of plain objects, that have been read; `tensors` the tensors.
    """
    kind = type(value)
    if kind in _SIMPLE:
        return kind, value
    if kind is float:
        return kind, repr(value)  # NaN equals itself, and -0.0 is not 0.0
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Same(value)
    if isinstance(value, (*_WITHOUT_STATE, torch.nn.Module)) or depth > _DEEPEST:
        return Same(value)
    if isinstance(value, types.MethodType):
        return Same(value.__func__), Same(value.__self__)
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _of_container(value, holders, tensors, depth)
    state = getattr(value, "__dict__", None)
    if not isinstance(state, dict) or not _is_plain(state, 0):
        return Same(value)
    return Same(value), _of_container(state, holders, tensors, depth)


def _of_container(value: Any, holders: Holders, tensors: list[torch.Tensor], depth: int) -> Hashable:
    if len(value) > _LARGEST:
        return Same(value), len(value)
    if not isinstance(value, (tuple, frozenset)):
        holders.append(value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(comparable(element, holders, tensors, depth + 1) for element in value)
    if isinstance(value, dict):
        return type(value), tuple(
            (comparable(key, holders, tensors, depth + 1), comparable(element, holders, tensors, depth + 1))
            for key, element in value.items()
        )
    return type(value), tuple(comparable(element, holders, tensors, depth + 1) for element in value)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether an object is data, as a configuration is: a trainer's counters do not lead to other graphs."""
    if depth > _DEEPEST:
        return False
    if type(value) in _SIMPLE or isinstance(value, (float, *_WITHOUT_STATE)):
        return True
    if isinstance(value, dict):
        return len(value) <= _LARGEST and all(
            _is_plain(element, depth + 1) for pair in value.items() for element in pair
        )
    if isinstance(value, (list, tuple, set, frozenset)):
        return len(value) <= _LARGEST and all(_is_plain(element, depth + 1) for element in value)
    state = getattr(value, "__dict__", None)
    return isinstance(state, dict) and not isinstance(value, torch.nn.Module) and _is_plain(state, depth + 1)
