"""The index of a text table: a killed build continues and gives the same bytes, and builds at once do not interfere."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflow.workflow.data import cache_lock
from ortflow.workflow.data.tables import pieces, scan, text_table
from ortflow.workflow.data.tables.text_table import TextTable
from ortflow.workflow.errors import UserError

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two tables in many pieces: quoted line ends, empty and bad lines, a column that becomes text at its end."""
    monkeypatch.setattr(pieces, "PIECE", 512)
    monkeypatch.setattr(scan, "_SAVED", 0.0)
    random = np.random.default_rng(0)
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for number, file in enumerate(files):
        lines = [f'{value:.5f},"a, b\nc",{row}\n' for row, value in enumerate(random.normal(size=200))]
        lines[50], lines[120] = "\n" * 600, "1,2,3,4\n"
        lines[-1] = f"{number}.5,x,late\n"
        file.write_text("x,note,key\n" + "".join(lines))
    return files


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORTFLOW_CACHE", str(folder))
    return folder / "tables"


def build(files: list[Path]) -> None:
    TextTable(files, {})


def killed_build(files: list[Path], after: int) -> None:
    """Build in this process, which is killed when so many pieces have been added."""
    left = [after]
    add = scan._add

    def counted(*given: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return add(*given)

    scan._add = counted
    build(files)


def in_process(target: Any, *given: Any) -> int | None:
    process = FORK.Process(target=target, args=given)
    process.start()
    process.join()
    return process.exitcode


def content(folder: Path) -> dict[str, bytes]:
    (entry,) = [each for each in folder.iterdir() if each.is_dir()]
    return {file.name: file.read_bytes() for file in entry.iterdir()}


def test_a_killed_build_continues_and_gives_the_same_bytes(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = use_cache(tmp_path / "whole", monkeypatch)
    build(files)
    expected = content(whole)
    assert set(expected) == {"starts.bin", "sizes.bin", "record.json"}
    record = json.loads(json.loads(expected["record.json"])[0])["record"]
    assert (record["bad"], record["file_rows"], record["columns"]["key"]["kind"]) == (2, [198, 198], "text")
    cache = use_cache(tmp_path / "killed", monkeypatch)
    shares = []
    # Three times: within the first file, then within the second, then whole.
    for after in (4, 7, 10_000):
        capfd.readouterr()
        code = in_process(killed_build, files, after)
        assert code == (0 if after == 10_000 else -signal.SIGKILL)
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("indexing continues")]
        shares += [int(line.rsplit(" ", 1)[1].rstrip("%")) for line in lines]
    assert len(shares) == 2
    assert 10 < shares[0] < 50 < shares[1] < 100, shares
    assert content(cache) == expected
    assert [each.name for each in cache.iterdir() if each.name.startswith(".")] == []


def test_what_was_saved_is_used_only_as_it_was_written(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = use_cache(tmp_path / "whole", monkeypatch)
    build(files)
    cache = use_cache(tmp_path / "killed", monkeypatch)
    for damage in ("saved.json", "starts.bin"):
        assert in_process(killed_build, files, 9) == -signal.SIGKILL
        (partial,) = cache.glob(".*")
        (partial / damage).write_bytes((partial / damage).read_bytes()[:-100])
        build(files)
        assert content(cache) == content(whole)
        shutil.rmtree(cache)
    # Another file under the same name is not continued.
    assert in_process(killed_build, files, 9) == -signal.SIGKILL
    files[0].write_text("x,note,key\n1,2,3\n")
    build(files)
    assert len(TextTable(files, {})) == 199
    (partial,) = cache.glob(".*")
    os.utime(partial, (0, 0))
    files[1].write_text("x,note,key\n1,2,3\n")
    build(files)
    assert not list(cache.glob(".*")), "what nobody continues is removed"


def test_processes_that_build_at_once_build_one_index(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = use_cache(tmp_path / "whole", monkeypatch)
    build(files)
    cache = use_cache(tmp_path / "shared", monkeypatch)
    # The first is killed while the others wait for it; one of them continues.
    processes = [FORK.Process(target=killed_build, args=(files, after)) for after in (5, 10_000, 10_000, 10_000)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(process.exitcode or 0 for process in processes)[1:] == [0, 0, 0]
    assert content(cache) == content(whole)
    assert [each.name for each in cache.iterdir() if not each.is_dir()] == []


def test_a_lock_that_its_holder_removed_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    flock, opened = cache_lock.fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        opened.append(file)
        if len(opened) == 1:  # another process releases the lock that this one has opened
            path.unlink()
        flock(file, operation)

    monkeypatch.setattr(cache_lock.fcntl, "flock", late)
    with cache_lock.held(path) as locked:
        assert locked
        assert os.path.samestat(path.stat(), os.fstat(opened[1].fileno()))


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = use_cache(tmp_path / "cache", monkeypatch)
    (tmp_path / "table.csv").write_text('x,y\n1,"2\n')
    with pytest.raises(UserError, match="begins a quoted field that has no end"):
        build([tmp_path / "table.csv"])
    assert not list(cache.iterdir())
    assert text_table._saved(tmp_path / "none") is None
