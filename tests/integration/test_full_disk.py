"""A disk that fills up during a run: nothing is lost, and the run reports the shortage and waits."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_slurm import Fake
from full_disks import LONG, STEPS, ends_undisturbed, fill, until_reported, wait_for_step
from launching import Bench
from project import ORTFLOW, curve, environment, events, of_kind
from tiny_runs import Tiny, has_traceback, is_root, result
from waits import PATIENCE

from ortflow.cli.submission import submission_of
from ortflow.launchers.budget import MOST_WITHOUT_STEP
from ortflow.launchers.records import State
from ortflow.launchers.slurm.launcher import SlurmLauncher
from ortflow.launchers.status import read_status
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.disk_space import Notice, OutOfDisk, is_full, out_of_disk

pytestmark = pytest.mark.rotates

NO_FAILURE = {"failures": 0, "backoff": {"first": 0.0, "limit": 0.0}}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if not is_root():
        pytest.skip("only root may mount a small file system")
    place = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], check=False)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def folder(disk: Path) -> Iterator[Path]:
    yield disk / "p"
    subprocess.run(["rm", "-rf", str(disk / "p"), str(disk / "filler")], check=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = Tiny.make(tmp_path_factory.mktemp("whole"), **LONG)
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    return tiny.run_dir


@pytest.mark.parametrize("step", [1, 450, 2000])
def test_a_disk_that_is_freed_in_time_costs_nothing(disk: Path, folder: Path, whole: Path, step: int) -> None:
    tiny = Tiny.make(folder, **LONG)
    child = tiny.start("run", "run.yaml")
    wait_for_step(tiny, step, child)
    filler = fill(disk)
    how = until_reported(tiny, child)
    assert how.waits is not None
    assert f"out of disk on {tiny.run_dir}" in how.waits
    assert "MB needed" in how.waits
    assert how.state is State.RUNNING
    listed = tiny.command("list")
    assert "out of disk on" in listed.out
    filler.unlink()
    ends_undisturbed(tiny, child, whole, PATIENCE)


def test_two_ranks_wait_together(disk: Path, folder: Path) -> None:
    tiny = Tiny.make(folder, **{**LONG, "resources": {"ranks_per_node": 2, "cpus_per_rank": 1}})
    child = tiny.start("run", "run.yaml")
    wait_for_step(tiny, 250, child)
    filler = fill(disk)
    assert "out of disk on" in str(until_reported(tiny, child).waits)
    time.sleep(10)  # training ends in the meantime
    filler.unlink()
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, out + err
    for rank in (0, 1):
        assert [r["step"] for r in of_kind(tiny.run_dir, "step", rank)] == list(range(1, STEPS + 1))
        assert not of_kind(tiny.run_dir, "rewind", rank)
    assert [r["event"] for r in RunDir(tiny.run_dir).read_attempts()] == ["submit", "start", "end"]


def test_output_to_a_full_disk_does_not_end_the_run(disk: Path, folder: Path, whole: Path) -> None:
    tiny = Tiny.make(folder, **LONG)
    with (disk / "p" / "out.txt").open("wb") as out:
        child = subprocess.Popen(
            [*ORTFLOW, "run", "run.yaml"], cwd=folder, env=environment(), stdout=out, stderr=out, text=True
        )
    wait_for_step(tiny, 450, child)
    filler = fill(disk)
    until_reported(tiny, child)
    filler.unlink()
    assert child.wait(timeout=PATIENCE) == 0
    assert result(tiny.run_dir) == result(whole)
    output = (disk / "p" / "out.txt").read_text()
    assert "finished at step" in output
    assert not has_traceback(output)


def test_a_run_that_waits_for_disk_space_stops_when_asked(disk: Path, folder: Path, whole: Path) -> None:
    tiny = Tiny.make(folder, **LONG)
    child = tiny.start("run", "run.yaml")
    wait_for_step(tiny, 450, child)
    filler = fill(disk)
    until_reported(tiny, child)
    child.terminate()
    out, err = child.communicate(timeout=PATIENCE)  # without the signal it would wait ten minutes for room
    assert child.returncode in (1, 75), out + err
    assert not has_traceback(out + err)
    filler.unlink()
    again = tiny.command("run", "run.yaml")
    assert again.code == 0, again.said
    assert (tiny.run_dir / "export/model.onnx").read_bytes() == (whole / "export/model.onnx").read_bytes()


def test_a_disk_that_stays_full_ends_the_run_once_with_one_sentence(disk: Path, folder: Path) -> None:
    short = {**LONG, "checkpoint": {**LONG["checkpoint"], "wait_for_room": 2}}
    tiny = Tiny.make(folder, **short)
    child = tiny.start("run", "run.yaml")
    wait_for_step(tiny, 450, child)
    filler = fill(disk)
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 1, out + err
    assert not has_traceback(out + err)
    (line,) = err.splitlines()
    assert "out of disk on" in line
    assert str(tiny.run_dir) in line
    filler.unlink()
    again = tiny.command("resume", "tiny")
    assert again.code == 0, again.said
    assert [step for step, *_ in curve(tiny.run_dir)] == list(range(1, STEPS + 1))


def test_a_run_without_any_disk_space_leaves_nothing(disk: Path, folder: Path) -> None:
    tiny = Tiny.make(folder)
    fill(disk)
    done = tiny.command("run", "run.yaml")
    assert done.code == 1, done.said
    assert not has_traceback(done.said)
    assert "out of disk on" in done.err
    assert not tiny.run_dir.parent.exists()


@pytest.mark.parametrize("room", [0, 4096, 8192])
def test_a_submission_that_finds_no_room_leaves_nothing(disk: Path, folder: Path, room: int) -> None:
    """The lock, the run file, the record: whichever has no room."""
    tiny = Tiny.make(folder)
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - room)
    done = tiny.command("run", "run.yaml", "--detach")
    assert done.code == 1, done.said
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: out of disk on {tiny.run_dir}")
    assert not tiny.run_dir.parent.exists()


@pytest.mark.parametrize("room", [0, 4096, 8192, 12288])
def test_a_job_that_finds_no_room_leaves_nothing(disk: Path, folder: Path, room: int) -> None:
    tiny, fake = Tiny.make(folder), Fake()
    launcher = SlurmLauncher(fake.slurm)
    request = launcher.request(submission_of(tiny.folder / "run.yaml", None, tiny.folder / "runs"))
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - room)
    with pytest.raises((OutOfDisk, OSError)) as caught:
        launcher.submit(request)
    assert is_full(caught.value)
    assert str(out_of_disk(caught.value)).startswith(f"out of disk on {tiny.run_dir}")
    assert not tiny.run_dir.parent.exists()
    assert fake.scripts == []


def test_verbs_report_missing_disk_space(disk: Path, folder: Path) -> None:
    tiny = Tiny.make(folder)
    done = tiny.command("run", "run.yaml", "train.steps=4")
    assert done.code == 0, done.said
    np.savez(disk / "samples.npz", x=np.random.default_rng(0).normal(size=(20_000, 8)).astype(np.float32))
    fill(disk)
    for words in (("resume", "tiny", "train.steps=8"), ("data", "convert", "../samples.npz", "-o", "samples.arrow")):
        done = tiny.command(*words)
        assert done.code == 1, done.said
        assert "out of disk on" in done.err, done.said
        assert not has_traceback(done.said)
    (disk / "samples.npz").unlink()


@pytest.mark.parametrize("room", [4096, 16384, 65536, 131072])
def test_a_run_that_begins_on_a_nearly_full_disk_waits(disk: Path, folder: Path, whole: Path, room: int) -> None:
    tiny = Tiny.make(folder, **LONG, restart=NO_FAILURE)
    filler = fill(disk)
    os.truncate(filler, filler.stat().st_size - room)
    child = tiny.start("run", "run.yaml")
    time.sleep(4)
    if child.poll() is None:
        filler.unlink()
        out, err = child.communicate(timeout=PATIENCE)
        assert child.returncode == 0, out + err
        assert not has_traceback(out + err)
        assert result(tiny.run_dir) == result(whole)
    else:
        out, err = child.communicate()
        assert not has_traceback(out + err)
        assert len(err.splitlines()) == 1, err
        assert "space" in err or "out of disk" in err


def test_a_rank_that_cannot_write_its_cause_is_out_of_disk(disk: Path, folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    bench = Bench.make(folder)
    bench.write(1, restart=NO_FAILURE)
    gate = tmp_path / "gate"
    script = {0: {"rank": 0, "step": 10, "do": "exit 1", "gate": str(gate)}}
    running = bench.start("run", "run.yaml", script=script)
    running.until(lambda: len(bench.events("step")) > 2)
    filler = fill(disk)
    gate.touch()
    run = RunDir(bench.run_dir)
    running.until(lambda: read_status(run).waits is not None)
    assert f"out of disk on {bench.run_dir}" in str(read_status(run).waits)
    filler.unlink()
    done = running.wait()
    assert done.code == 0, done.err
    first, second = bench.attempts("end")
    assert first["cause"].startswith(f"out of disk on {bench.run_dir}")
    assert first["counts"] is False
    assert second["outcome"] == "finished"
    assert read_status(run).failures == 0


def test_starts_without_disk_space_have_their_own_limit(tmp_path: Path) -> None:
    bench = Bench.make(tmp_path)
    bench.write(1, restart=NO_FAILURE)
    script = {number: {"step": 2, "do": "full"} for number in range(20)}
    done = bench.run("run", "run.yaml", script=script)
    assert done.code == 1, done.err
    assert len(bench.attempts("end")) == MOST_WITHOUT_STEP + 1
    assert "5 attempts" in done.err
    assert "out of disk on" in done.err


def test_a_notice_of_a_dead_writer_ends_with_the_shortage(disk: Path, folder: Path) -> None:
    folder.mkdir()
    heartbeat, lack = folder / ".heartbeat", OutOfDisk(folder / "checkpoints", 1 << 20)
    Notice(heartbeat).clear()
    filler = fill(disk)
    Notice(heartbeat).report(lack)
    assert str(Notice(heartbeat).read()) == str(lack)
    filler.unlink()
    assert Notice(heartbeat).read() is None
    assert str(Notice(heartbeat).last()) == str(lack)
    fill(disk)
    assert str(Notice(heartbeat).read()) == str(lack)


def test_a_kill_after_a_freed_disk_is_not_blamed_on_the_disk(disk: Path, folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    bench = Bench.make(folder)
    bench.write(1)
    gate = tmp_path / "gate"
    script = {0: {"rank": 0, "step": 9, "do": "signal 9", "gate": str(gate)}}
    running = bench.start("run", "run.yaml", script=script)
    running.until(lambda: len(bench.events("step")) > 2)
    filler = fill(disk)
    # A rank writes this when a checkpoint finds no space, and continues.
    Notice(RunDir(bench.run_dir).heartbeat).report(OutOfDisk(bench.run_dir, 1 << 20))
    filler.unlink()
    gate.touch()
    done = running.wait()
    assert done.code == 0, done.err
    assert bench.attempts("end")[0]["cause"] == "rank 0 was killed by SIGKILL"


def test_scalars_are_intact_after_a_full_disk(disk: Path, folder: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny = Tiny.make(folder, **LONG)
    child = tiny.start("run", "run.yaml")
    wait_for_step(tiny, 700, child)
    filler = fill(disk)
    until_reported(tiny, child)
    filler.unlink()
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0, out + err
    scalars = EventAccumulator(str(tiny.run_dir / "tensorboard"), size_guidance={"scalars": 0})
    scalars.Reload()
    assert [event.step for event in scalars.Scalars("loss")] == list(range(1, STEPS + 1))
    assert all(json.dumps(record) for record in events(tiny.run_dir))
