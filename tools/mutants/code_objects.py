"""The live functions that a change of their module's text concerns. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType

_Key = tuple[str, int]
"""Name and first line of a code object."""
CO_NEWLOCALS = 0x2
"""inspect.CO_NEWLOCALS: set for functions, not for the bodies of modules and classes."""


def changed_functions(
    before: str, after: str, name: str, functions: list[FunctionType]
) -> list[tuple[FunctionType, CodeType]] | None:
    """The live functions that change, with their new code; None if more than the code of functions changes.

    `before` and `after` are the texts of the module, `name` its path, `functions` its live functions.
    """
    old_module, new_module = compile(before, name, "exec"), compile(after, name, "exec")
    old, new = dict(_all(old_module)), dict(_all(new_module))
    if len(old) != _count(old_module) or old.keys() != new.keys():
        return None  # two lambdas in a line, or lines that have moved
    changed = {key for key in old if _own(old[key]) != _own(new[key])}
    if any(not new[key].co_flags & CO_NEWLOCALS or old[key].co_freevars != new[key].co_freevars for key in changed):
        return None
    # Functions around a changed one have its code among their constants.
    around = {key for key, code in new.items() if any(inner in changed for inner, _ in _all(code))}
    return [
        (function, new[key])
        for function in functions
        if (key := (function.__code__.co_name, function.__code__.co_firstlineno)) in around
    ]


def _all(code: CodeType) -> Iterator[tuple[_Key, CodeType]]:
    """A code object and all those in it."""
    yield (code.co_name, code.co_firstlineno), code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all(constant)


def _count(code: CodeType) -> int:
    return sum(Counter(key for key, _ in _all(code)).values())


def _own(code: CodeType) -> tuple[object, ...]:
    """What a code object is, apart from those in it."""
    constants = tuple((type(value), value) for value in code.co_consts if not isinstance(value, CodeType))
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants, code.co_flags
