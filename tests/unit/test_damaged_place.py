"""An invalid record of a cluster is ignored."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ortflow.launchers.kubernetes.place import FILE, Cursor, Place, read_place, write_place
from ortflow.workflow.run.rundir import RunDir

PLACE = Place("lab", "gpt", "gpt-1", "east", 2, {"uid": Cursor("pod", "2026-01-01T00:00:00Z", 3, True)}, {"log": 7})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_place(RunDir(tmp_path), PLACE)
    assert read_place(RunDir(tmp_path)) == PLACE
    (tmp_path / FILE).write_text('{"namespace": "lab", "name": "gpt"}')
    assert read_place(RunDir(tmp_path)) == Place("lab", "gpt")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "7", "{}", '{"namespace": 7, "name": "x"}', '{"namespace": "a", "name": "b", "job": ["c"]}',
        "[" * 9999, '{"namespace": "a", "name": "b", "more": 1}',
        '{"namespace": "a", "name": "b", "attempt": "two"}', '{"namespace": "a", "name": "b", "cursors": {"u": 1}}',
    ],
)  # fmt: skip
def test_an_invalid_record_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_place(RunDir(tmp_path)) is None


def test_a_special_file_is_ignored(tmp_path: Path) -> None:
    assert read_place(RunDir(tmp_path)) is None
    os.mkfifo(tmp_path / FILE)
    assert read_place(RunDir(tmp_path)) is None
