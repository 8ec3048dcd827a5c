"""Bytes and lines of several files: how they are divided into blocks, and which line is too long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortflow.workflow.data import text
from ortflow.workflow.errors import UserError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """25 bytes in three files, with the numbers 0 to 24."""
    paths = [tmp_path / name for name in "abc"]
    for path, first, last in zip(paths, (0, 5, 6), (5, 6, 25), strict=True):
        path.write_bytes(bytes(range(first, last)))
    return paths


@pytest.mark.parametrize("size", [1, 4, 8, 25, 100])
@pytest.mark.parametrize("length", [1, 3, 24])
def test_windows_do_not_depend_on_the_size_of_a_block(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, size: int, length: int
) -> None:
    monkeypatch.setattr(text, "BATCH_BYTES", size)
    blocks = [len(block) for block in text._blocks(files)]
    assert blocks == [size] * (25 // size) + [25 % size] * (25 % size > 0)
    rows = np.concatenate(list(text.windows(files, length)))
    assert rows.tolist() == [list(range(first, first + length + 1)) for first in range(0, 25 - length, length)]
    assert text.count_windows(files, length) == len(rows) == 24 // length


def test_lines_are_grouped_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "BATCH_BYTES", 6)
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\ntwo\r\nthree\nfour\nfive")
    chunks = list(text.line_chunks([path]))
    assert [chunk.values.tobytes() for chunk in chunks] == [b"one\ntwo\n", b"three\n", b"four\nfive\n"]
    assert [chunk.offsets.tolist() for chunk in chunks] == [[0, 4, 8], [0, 6], [0, 5, 10]]
    assert text.count_lines([path]) == 5


@pytest.mark.parametrize("end", [b"\n", b""])
def test_the_longest_line_has_16_mib_with_its_newline(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a" * ((16 << 20) - len(end)) + end + b"b\n" * bool(end))
    assert text.count_lines([path]) == 1 + bool(end)
    path.write_bytes(b"b\n" + b"a" * ((16 << 20) + 1 - len(end)) + end)
    with pytest.raises(UserError, match="a line of more than 16 MiB"):
        text.count_lines([path])


def test_hidden_files_are_found_only_by_their_names(tmp_path: Path) -> None:
    for name in ("b", ".hidden", "sub/a", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert text.find_files([str(tmp_path)]) == [tmp_path / "b", tmp_path / "sub/a"]
    assert text.find_files([str(tmp_path / ".hidden"), str(tmp_path / "**/a")]) == [
        tmp_path / ".hidden",
        tmp_path / "sub/a",
    ]
    with pytest.raises(UserError) as raised:
        text.find_files([str(tmp_path), str(tmp_path / "nothing*")])
    assert raised.value.where == str(tmp_path / "nothing*")
