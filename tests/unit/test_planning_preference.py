"""The order in which `ortflow plan` lists layouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ortflow.workflow.planning.layout import Layout
from ortflow.workflow.planning.preference import ordered


def candidate(layout: Layout, seconds: float, recompute: str | None = None, memory: float = 1.0) -> Any:
    return SimpleNamespace(
        layout=layout,
        recompute=recompute,
        time=SimpleNamespace(total=seconds),
        memory=SimpleNamespace(total=memory),
    )


DATA, ZERO = Layout(2), Layout(2, zero=1)
PIPELINE, HORIZONTAL = Layout(1, pipeline=2), Layout(1, horizontal=2)


def test_of_equally_fast_layouts_the_simplest_is_first() -> None:
    made = [candidate(HORIZONTAL, 1.0), candidate(PIPELINE, 1.02), candidate(ZERO, 1.05), candidate(DATA, 1.1)]
    assert [each.layout for each in ordered(made)] == [DATA, ZERO, PIPELINE, HORIZONTAL]


def test_a_much_faster_layout_is_first_whatever_it_divides() -> None:
    made = [candidate(DATA, 1.3), candidate(HORIZONTAL, 1.0), candidate(PIPELINE, 1.4)]
    assert [each.layout for each in ordered(made)] == [HORIZONTAL, DATA, PIPELINE]


def test_recomputation_is_behind_the_layout_without_it() -> None:
    made = [candidate(DATA, 1.0, "layers"), candidate(DATA, 1.05)]
    assert [each.recompute for each in ordered(made)] == [None, "layers"]
    same = [candidate(DATA, 1.0, memory=2.0), candidate(DATA, 1.0, memory=1.0)]
    assert [each.memory.total for each in ordered(same)] == [1.0, 2.0]
