"""The user's limits (`ulimit`): a run says which one it has reached, and does not wait for what cannot come."""

from __future__ import annotations

import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import save, state
from messages import mentions
from project import ORTFLOW, Project, environment
from tiny_runs import Tiny

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.verify import verify
from ortflow.workflow.data.ahead import ReadAhead
from ortflow.workflow.run.rundir import append_json_line
from ortflow.workflow.system.disk_space import RECORDS, has_room


def limited(limit: int, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a limit of its files' size, in bytes."""
    return subprocess.run(
        [*ORTFLOW, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False,
        stdin=subprocess.DEVNULL, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )  # fmt: skip


def test_a_record_that_reaches_the_limit_ends_the_run_at_once(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    done = limited(40_960, tiny.folder, "run", "run.yaml", "train.steps=3000", "checkpoint.every_steps=200")
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert mentions(said, "rank-0000.jsonl", "40960 bytes", "ulimit -f")
    assert "waiting" not in said
    assert tiny.command("resume", "tiny", "train.steps=600").code == 0, "without the limit it continues"


def test_a_checkpoint_that_is_too_large_is_found_before_the_first_step(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "gpt", width=64)
    project.write("large", resources__ranks_per_node=1, train__steps=5)
    done = limited(900_000, project.folder, "run", "large.yaml")
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert mentions(said, "checkpoints", "bytes", "900000 bytes", "ulimit -f")
    assert "step 1/" not in said


@pytest.fixture
def file_limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("file_limit")
def test_a_limit_is_not_a_full_disk(tmp_path: Path) -> None:
    assert has_room(tmp_path / "new", RECORDS)
    with pytest.raises(OSError, match="File too large"):
        append_json_line(tmp_path / "records", {"text": "x" * 9000})
    assert (tmp_path / "records").stat().st_size == 0


@pytest.fixture
def no_threads() -> Iterator[None]:
    """Let the system refuse new threads, as `ulimit -u` does: no process has room for such a stack."""
    before = threading.stack_size(1 << 47)
    try:
        with pytest.raises(RuntimeError):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.usefixtures("no_threads")
def test_a_save_without_a_thread_is_written_all_the_same(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 10, state(1))
    assert verify(store, 10) == []


@pytest.mark.usefixtures("no_threads")
def test_reading_ahead_without_a_thread_loses_no_sample() -> None:
    with ReadAhead(([number] for number in range(20)), depth=2, worthwhile=-1.0) as ahead:
        first = [next(ahead) for _ in range(3)]
        threading.stack_size(0)
        assert [*first, *ahead] == list(range(20))
