"""The index of a text table: a killed build continues and gives the same bytes, and builds at once do not interfere."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from ortflow.workflow.data import cache_lock
from ortflow.workflow.data.tables import decode, pieces, scan, store
from ortflow.workflow.data.tables.columnar import ColumnarTable
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
    scan._add = counted(scan._add, after)
    build(files)


def killed_decoding(files: list[Path], after: int) -> None:
    """Decode in this process, which is killed when so many batches have been added."""
    decode._added = counted(decode._added, after)
    ColumnarTable(files)


def counted(add: Any, after: int) -> Any:
    """The function, which kills the process when it has been called so often."""
    left = [after]

    def add_or_end(*given: Any) -> Any:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return add(*given)

    return add_or_end


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


def test_a_killed_decoding_continues_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decode, "_ROWS", 10)
    monkeypatch.setattr(decode, "_PART_BYTES", 400)
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    random = np.random.default_rng(0)
    for file in files:
        columns = {"x": random.normal(size=95), "word": [f"w{row % 7}" for row in range(95)]}
        parquet.write_table(pa.table(columns), file, row_group_size=33)
    whole = use_cache(tmp_path / "whole", monkeypatch)
    table = ColumnarTable(files)
    expected = content(whole)
    assert len(expected) > 6
    cache = use_cache(tmp_path / "killed", monkeypatch)
    for after in (7, 8, 10_000):
        assert in_process(killed_decoding, files, after) == (0 if after == 10_000 else -signal.SIGKILL)
    printed = [line for line in capfd.readouterr().err.splitlines() if line.startswith("decoding continues")]
    behind = [int(line.split()[3]) for line in printed]
    assert len(behind) == 2
    assert 0 < behind[0] < 95 < behind[1] < 190
    assert content(cache) == expected
    again = ColumnarTable(files)
    assert (again.file_rows, again.summaries, again.digest) == ([95, 95], table.summaries, table.digest)
    order = np.array([189, 0, 94, 95])
    assert again.take(order, ["x"]).equals(table.take(order, ["x"]))
    assert again.take(np.array([96]), ["word"])["word"].to_pylist() == ["w1"]
    # A part that is gone is decoded again.
    shutil.rmtree(cache)
    assert in_process(killed_decoding, files, 12) == -signal.SIGKILL
    (partial,) = cache.glob(".*")
    (partial / "00000.arrow").unlink()
    ColumnarTable(files)
    assert content(cache) == expected


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1 << 16)
    use_cache(tmp_path / "cache", monkeypatch)
    rows = "".join(f'{row / 7:.6f},"a, b",{row % 50}\n' for row in range(10_000))

    def peak(size: int) -> int:
        file = tmp_path / f"{size}-{len(list(tmp_path.iterdir()))}.csv"
        file.write_text("x,note,key\n" + rows * size)
        tracemalloc.start()
        build([file])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak(1)  # also imports
    # Threads that earlier tests have left allocate, too: the least of some builds is that of the build.
    small, large = (min(peak(size) for _ in range(3)) for size in (2, 16))
    assert large < 1.2 * small + (1 << 16)


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


@pytest.mark.parametrize("state", ["whole", "damaged"])
def test_without_locks_the_second_of_two_builds_is_dropped(
    state: str, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = use_cache(tmp_path / "whole", monkeypatch)
    build(files)
    cache = use_cache(tmp_path / "shared", monkeypatch)
    monkeypatch.setattr(cache_lock.fcntl, "flock", no_locks)
    check, inner = store.check_unchanged, []

    def late(*given: Any) -> None:
        """Another build ends when this one is about to."""
        check(*given)
        if not inner:
            inner.append(True)
            build(files)
            (entry,) = (each for each in cache.iterdir() if each.is_dir() and each.name[0] != ".")
            inner[:] = [entry.stat().st_ino]
            if state == "damaged":
                (entry / "record.json").write_text("{")

    monkeypatch.setattr(store, "check_unchanged", late)
    build(files)
    assert content(cache) == content(whole)
    (entry,) = (each for each in cache.iterdir() if each.is_dir())
    assert (entry.stat().st_ino == inner[0]) == (state == "whole"), "what others may read stays"


def no_locks(file: Any, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


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


@pytest.mark.parametrize("moment", ["_add", "_read_text_again"])
def test_a_file_that_changes_while_it_is_indexed_is_refused(
    moment: str, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = use_cache(tmp_path / "cache", monkeypatch)
    scanning, left = getattr(scan, moment), [3 if moment == "_add" else 0]

    def changing(*given: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:  # other numbers, as many bytes
            files[0].write_text(files[0].read_text().replace("0.", "7."))
        return scanning(*given)

    with monkeypatch.context() as patched:
        patched.setattr(scan, moment, changing)
        with pytest.raises(UserError, match="has changed while it was read"):
            build(files)
    assert not list(cache.iterdir()), "an index of two versions is not kept"
    build(files)


def test_a_file_that_changes_while_it_is_decoded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = use_cache(tmp_path / "cache", monkeypatch)
    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": [1, 2]}), file)
    added = decode._added

    def changing(*given: Any) -> Any:
        parquet.write_table(pa.table({"x": [3, 4, 5]}), file)
        return added(*given)

    monkeypatch.setattr(decode, "_added", changing)
    with pytest.raises(UserError, match="has changed while it was read"):
        ColumnarTable([file])
    assert not list(cache.iterdir())
