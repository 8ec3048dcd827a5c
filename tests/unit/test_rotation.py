"""Parts of long lists of cases: together they are the whole list, and a malformed part is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rotation import piece, rotating

NAMES = [f"case-{number}" for number in range(23)]
ALWAYS = ("case-2", "case-19")


def run(part: str) -> list[str]:
    return [parameter.id for parameter in rotating(NAMES, ALWAYS, part) if not parameter.marks]


def test_parts_together_run_each_case_once_and_some_always() -> None:
    parts = [run(f"{first}/7") for first in range(7)]
    assert all(set(ALWAYS) <= set(part) for part in parts)
    assert sorted(name for part in parts for name in part if name not in ALWAYS) == sorted({*NAMES} - {*ALWAYS})
    assert {len(part) for part in parts} == {5}


def test_without_a_part_only_some_run() -> None:
    assert run("") == list(ALWAYS)
    assert [parameter.id for parameter in rotating(NAMES, ALWAYS, "")] == NAMES


def test_pieces_of_a_walk_make_each_of_its_steps_once() -> None:
    walk = [0, 3, 1, 2, 0, 2, 3, 0]
    pieces = [piece(walk, f"{first}/3") for first in range(3)]
    assert [step for each in pieces for step in pairwise(each)] == list(pairwise(walk))
    assert piece(walk, "") == []


@pytest.mark.parametrize("part", ["7/7", "3", "a/b", "-1/7", "3/", "1/0"])
def test_a_wrong_part_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="ORTFLOW_PART"):
        run(part)


def test_a_case_that_always_runs_must_be_there() -> None:
    with pytest.raises(ValueError, match="pipelin-2"):
        rotating(NAMES, ("pipelin-2",), "")
