"""The run files of a job array: what a script holds of each task gives back the whole file."""

from __future__ import annotations

from typing import Any

import pytest

from ortflow.manifests.array import DIFFERENCES, run_file, run_files
from ortflow.workflow.spec.file.dump import dump_values

FIRST: dict[str, Any] = {"name": "a-0", "train": {"lr": 1, "by": {"x.y": 2}, "steps": None}, "last": "ends with ---"}


@pytest.mark.parametrize(
    "other",
    [
        {**FIRST, "name": "a-1"},
        {**FIRST, "train": {**FIRST["train"], "lr": 1.0}},
        {**FIRST, "train": {**FIRST["train"], "lr": True, "steps": "1e-3"}},
        {**FIRST, "train": {**FIRST["train"], "by": {"x.y": 3, "z": [1, {"a": "\u2028"}]}}},
        {**FIRST, "train": {"momentum": 0.9}},
        {**FIRST, "last": "a\n---\nb"},
        FIRST,
    ],
)
def test_each_task_gets_its_whole_run_file(other: dict[str, Any]) -> None:
    text = run_files([FIRST, other, FIRST])
    assert text.count(DIFFERENCES) == 2
    assert [run_file(text, task) for task in range(3)] == [dump_values(one) for one in (FIRST, other, FIRST)]


def test_the_script_of_an_earlier_version() -> None:
    """It holds whole run files."""
    files = [dump_values({**FIRST, "name": f"a-{task}"}) for task in range(2)]
    assert [run_file("---\n".join(files), task) for task in range(2)] == files
