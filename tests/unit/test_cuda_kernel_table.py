"""The table of a step's kernels that benchmarks/cuda_kernels.py makes of a trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from cuda_kernels import Work, gaps, table, work_in


def event(name: str, start: float, length: float, category: str = "kernel", **arguments: Any) -> dict[str, Any]:
    return {"cat": category, "name": name, "ts": start, "dur": length, "args": arguments}


def test_what_keeps_the_gpu_busy_is_told_apart_by_its_grid() -> None:
    trace = {
        "traceEvents": [
            event("fused", 30, 2, grid=[4, 1, 1]),
            event("fused", 10, 5, grid=[8, 1, 1]),
            event("launch", 0, 100, "cuda_runtime"),
            event("Memset", 1, 1, "gpu_memset"),
            {"ph": "M", "name": "a process"},
        ]
    }
    assert work_in(trace) == [Work("Memset", 1, 2), Work("fused (8, 1, 1)", 10, 15), Work("fused (4, 1, 1)", 30, 32)]
    assert work_in(trace, by_name=True) == [Work("Memset", 1, 2), Work("fused", 10, 15), Work("fused", 30, 32)]


def test_work_beside_other_work_leaves_no_gap() -> None:
    work = [Work("a", 0, 10), Work("b", 2, 4), Work("c", 6, 12), Work("d", 15, 16)]
    assert gaps(work) == [("d", 3)]


def test_sums_are_those_of_one_step() -> None:
    lines = table([Work("a", 0, 10), Work("b", 12, 14), Work("a", 50, 70)], 2)
    assert lines[2] == "| a | 1.0 | 15.0 | 15 |"
    assert lines[3] == "| b | 0.5 | 2.0 | 1 |"
    assert any("gaps 19 us, of which 1 us in 0 gaps under 20 us" in line for line in lines), lines
    assert lines[-2:] == ["- 18 before a", "- 1 before b"]
