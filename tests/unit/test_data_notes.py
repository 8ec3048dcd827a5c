"""What stands beside an exported model replaces its own earlier version, and no other file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortflow.workflow.data.notes import write_notes

CLASSES = {"0": "cat", "1": "dog"}
INPUTS = {"x": {"parts": [{"column": "age"}], "stacked": True}}


def test_notes_are_written_and_replaced(tmp_path: Path) -> None:
    assert write_notes(tmp_path, {}, {}) == []
    assert list(tmp_path.iterdir()) == []
    for classes in ({"0": "bird"}, CLASSES):
        assert write_notes(tmp_path, classes, INPUTS) == []
    assert json.loads((tmp_path / "classes.json").read_text()) == ["cat", "dog"]
    assert json.loads((tmp_path / "inputs.json").read_text()) == INPUTS


@pytest.mark.parametrize("content", ['{"a": 1}', "[1, 2]", "no JSON", ""])
def test_files_of_others_are_kept(tmp_path: Path, content: str) -> None:
    for name in ("classes.json", "inputs.json"):
        (tmp_path / name).write_text(content)
    faults = write_notes(tmp_path, CLASSES, INPUTS)
    assert len(faults) == 2
    for name, fault in zip(("classes.json", "inputs.json"), faults, strict=True):
        assert f"{tmp_path / name} was not written by ortflow and is kept" in fault
        assert (tmp_path / name).read_text() == content


def test_a_folder_that_cannot_be_written_to_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").mkdir()
    (fault,) = write_notes(tmp_path, {}, INPUTS)
    assert str(tmp_path / "inputs.json") in fault
