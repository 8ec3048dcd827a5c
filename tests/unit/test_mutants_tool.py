"""The functions to which tools/mutants gives changed code, without importing their module again; samples of mutants."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "mutants"
MODULE = """
LIMIT = 3

def outer(value=1):
    def inner():
        return value + 1
    return inner()

class Shape:
    sides = 4
    def area(self):
        return self.sides * 2
"""


@pytest.fixture
def changed_functions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    from code_objects import changed_functions

    yield changed_functions
    sys.modules.pop("code_objects")


def loaded() -> dict:
    names: dict = {}
    exec(compile(MODULE, "module.py", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("before", "after", "result"),
    [("value + 1", "value - 1", (0, 8)), ("sides * 2", "sides / 2", (2, 2))],
)
def test_a_change_within_a_function_reaches_its_live_objects(changed_functions, before, after, result) -> None:
    names = loaded()
    functions = [names["outer"], names["Shape"].area]
    changes = changed_functions(MODULE, MODULE.replace(before, after), "module.py", functions)
    assert changes is not None
    for function, code in changes:
        assert isinstance(function, FunctionType)
        function.__code__ = code
    assert (names["outer"](), names["Shape"]().area()) == result


@pytest.mark.parametrize(
    ("before", "after"), [("LIMIT = 3", "LIMIT = 4"), ("value=1", "value=2"), ("sides = 4", "sides = 5")]
)
def test_a_change_of_what_an_import_runs_needs_another_import(changed_functions, before, after) -> None:
    assert changed_functions(MODULE, MODULE.replace(before, after), "module.py", []) is None


def test_a_sample_is_the_same_each_time_and_a_larger_one_contains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from sample import sample

    sys.modules.pop("sample")
    every = [SimpleNamespace(key=f"AddNot {number}") for number in range(100)]
    few, more, others = sample(every, 10, 0), sample(every, 20, 0), sample(every, 10, 1)
    assert few == sample(list(reversed(every)), 10, 0)[::-1]
    assert [one for one in every if one in few] == few, "in their order"
    assert all(one in more for one in few)
    assert others != few
    assert (len(few), sample(every, 200, 0)) == (10, every)
