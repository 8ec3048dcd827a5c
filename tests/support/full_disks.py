"""Runs on a file system that a test fills up: what is reported meanwhile, and when."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from project import of_kind
from tiny_runs import RUN, Tiny, has_traceback, result
from waits import PATIENCE

from ortflow.launchers.status import RunStatus, read_status
from ortflow.workflow.run.rundir import RunDir

STEPS = 3000
LONG = {
    "train": {**RUN["train"], "steps": STEPS},
    "checkpoint": {"every_steps": 100, "keep": {"newest": 2}},
    "monitor": {"every_steps": 10},
}


@contextmanager
def mounted(place: Path, size: str) -> Iterator[Path]:
    """A small file system of this size (`64k`) at a new folder; skips the test where none can be mounted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Use up all free space."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1 << 8, 1):
            while True:
                try:
                    if file.write(b"x" * size) < size:
                        break
                except OSError:
                    break
    return filler


def wait_for_step(tiny: Tiny, step: int, child: subprocess.Popen[str]) -> None:
    path = tiny.run_dir / "events" / "rank-0000.jsonl"
    wanted = f'"step":{step},'.encode()
    while not path.exists() or wanted not in path.read_bytes():
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)


def until_reported(tiny: Tiny, child: subprocess.Popen[str]) -> RunStatus:
    end = time.monotonic() + PATIENCE
    while True:
        how = read_status(RunDir(tiny.run_dir))
        if how.waits is not None:
            return how
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < end
        time.sleep(0.1)


def ends_undisturbed(tiny: Tiny, child: subprocess.Popen[str], whole: Path, seconds: float) -> None:
    """Check that a run ends in one attempt, bit-identical to `whole`, each step done once."""
    out, err = child.communicate(timeout=seconds)
    assert child.returncode == 0, out + err
    assert not has_traceback(out + err)
    assert result(tiny.run_dir) == result(whole)
    assert [r["step"] for r in of_kind(tiny.run_dir, "step")] == list(range(1, STEPS + 1))
    assert [r["event"] for r in RunDir(tiny.run_dir).read_attempts()] == ["submit", "start", "end"]
    assert read_status(RunDir(tiny.run_dir)).waits is None
