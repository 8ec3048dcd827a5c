"""A disk that fills up under a training program: one sentence, the older checkpoint stays, and the run goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disks import fill, mounted
from messages import mentions
from program_runs import Programs
from waits import PATIENCE, wait_until

from ortflow.workflow.checkpoint.program_save import begin_program
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.program.rendezvous import _publish, rendezvous_file
from ortflow.workflow.run.rundir import RunDir

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="process groups and adoption of orphans are Linux's"),
    pytest.mark.rotates,
]
PROGRAM = f"""
    import os, pathlib, sys, time
    sys.path.insert(0, {str(Path(__file__).parent.parent / "support")!r})
    import ortflow.program
    from full_disks import fill

    run = ortflow.program.context()
    once = pathlib.Path(os.environ["ONCE"])

    def use_up(place):
        if (place, step, run.rank) == (sys.argv[1], 3, 0) and not once.exists():
            once.touch()
            fill(pathlib.Path(os.environ["DISK"]))

    run.total = 5
    first = 0 if run.latest() is None else int((run.latest() / "rank-0").read_text())
    print("begins after", first, flush=True)
    for step in range(first + 1, 6):
        use_up("log")
        print("x" * 5000, flush=True)
        run.log(step=step, loss=1 / step)
        run.step(step)
        with run.commit(step) as folder:
            use_up("in the commit")
            (folder / f"rank-{{run.rank}}").write_text(str(step) + " " * 5000)
            if run.rank == 0:
                time.sleep(0.3)
            use_up("behind the files")
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "4m") as place:
        yield place


@pytest.fixture
def programs(disk: Path) -> Programs:
    programs = Programs(disk / "p")
    programs.folder.mkdir()
    programs.write(PROGRAM)
    return programs


@pytest.mark.parametrize("place", ["log", "in the commit", "behind the files"])
def test_the_run_waits_for_room_and_goes_on(place: str, programs: Programs, disk: Path, tmp_path: Path) -> None:
    """No failure counts, and what could not be committed is gone."""
    once, heartbeat = tmp_path / "once", programs.folder / "runs/train/.heartbeat"
    child = programs.start(
        "run", "train.py", "--ranks", "2", "restart.failures=0", "--", place, ONCE=str(once), DISK=str(disk)
    )
    wait_until(
        lambda: once.exists() and b"needed" in heartbeat.read_bytes(),
        alive=lambda: child.poll() is None,
        output=child.communicate,
    )
    assert programs.left() == [], "all ranks end"
    shown = programs.start("status", "train")
    output, _ = shown.communicate(timeout=PATIENCE)
    assert mentions(output, "waits", "out of disk on", "MB needed"), output
    names = sorted(path.name for path in (programs.folder / "runs/train/checkpoints").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    (disk / "filler").unlink()
    output, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, output
    assert mentions(output, "out of disk on", "waiting"), output
    assert "begins after 2" in programs.log(attempt=1)
    assert [record["step"] for record in programs.events("step")] == [1, 2, 3, 4, 5]
    assert programs.left() == []
    assert not [
        path for path in (programs.folder / "runs/train").rglob(".*") if path.name.startswith((".tmp", ".rend"))
    ]


def test_a_submission_without_room_leaves_nothing(programs: Programs, disk: Path) -> None:
    fill(disk)
    for words in (("run", "train.py"), ("run", "train.py", "--detach"), ("submit", "-b", "local", "train.py")):
        done = programs.start(*words)
        output, _ = done.communicate(timeout=PATIENCE)
        assert done.returncode == 1, output
        assert output.startswith(f"error: out of disk on {programs.folder / 'runs/train'}"), output
        assert not (programs.folder / "runs").exists()


def test_an_address_that_cannot_be_written_leaves_no_file(disk: Path) -> None:
    run = RunDir(disk / "run")
    run.root.mkdir()
    filler = fill(disk)
    with pytest.raises(OSError, match="No space left") as caught:
        _publish(rendezvous_file(run, 0), 0, {"addresses": ["127.0.0.1"] * 1000})
    assert caught.value.filename == str(rendezvous_file(run, 0))
    assert list(run.root.iterdir()) == []
    os.truncate(filler, 0)
    _publish(rendezvous_file(run, 0), 0, {"addresses": ["127.0.0.1"]})
    assert [path.name for path in run.root.iterdir()] == [".rendezvous-0"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # CPython 3.12: it forks beside threads
@pytest.mark.parametrize("deleted", range(12))
def test_a_save_that_was_being_deleted_is_deleted_at_the_next_start(tmp_path: Path, deleted: int) -> None:
    """A process killed amid the deletion of a program's files leaves the mark that allows it."""
    store = DirectoryStore(tmp_path / "checkpoints")
    folder = begin_program(store, 3, 0)
    (folder / "sub").mkdir()
    for name in (*"abcdefghi", "sub/state"):
        (folder / name).write_text("x")
    if (child := os.fork()) == 0:
        unlink, calls = os.unlink, iter(range(99))
        os.unlink = lambda *place, **more: os._exit(9) if next(calls) == deleted else unlink(*place, **more)
        store.abandon(3, 0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (9 if deleted < 11 else 0)
    assert store.clean() == ([folder] if deleted < 11 else [])
    assert not folder.exists()
