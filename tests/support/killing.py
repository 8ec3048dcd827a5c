"""A run of which one rank is killed, and what must be true of it afterwards."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from project import ORTFLOW, Project, environment, logs, of_kind

from ortflow.launchers.supervision.processes import family, of_run, ranks_among
from ortflow.workflow.run.rundir import RunDir

FAULTS = Path(__file__).parent / "faults"
ENDS_WITHIN = 30.0
"""Seconds from the kill of a rank to the end of the attempt: the launcher gives the others 5."""
GONE_WITHIN = 60.0
"""Seconds in which the operating system has removed the processes of an attempt that has ended."""


def run_and_kill(project: Project, file: Path, rank: int, step: int, limit: float = 500, **settings: str) -> Path:
    """Kill a rank after the checkpoint of a step, let the run end, and check all but its results; its directory.

    The attempt ends with the rank as the cause, the next resumes and finishes, and neither processes nor shared
    memory stay. `settings` are further variables of the run's environment.
    """
    run_dir = project.run_dir(file.stem)
    saved = run_dir / "checkpoints" / f"step-{step:08d}" / "COMMITTED"
    # A busy machine needs longer to find the process than a few steps of a small model take.
    slow = environment(PYTHONPATH=str(FAULTS), SLOW="0.3 1", **settings)
    with subprocess.Popen([*ORTFLOW, "run", file.name], cwd=project.folder, env=slow) as launcher:
        ranks: dict[int, psutil.Process] = {}
        while not saved.exists() and launcher.poll() is None:
            ranks = ranks_among(family(psutil.Process(launcher.pid))) if rank not in ranks else ranks
            time.sleep(0.02)
        assert rank in ranks, logs(run_dir)
        everyone, memory = family(psutil.Process(launcher.pid))[1:], segments(ranks.values())
        killed = time.time()
        ranks[rank].kill()
        assert launcher.wait(limit) == 0, logs(run_dir)
    ends = [record for record in RunDir(run_dir).read_attempts() if record["event"] == "end"]
    assert [end["outcome"] for end in ends] == ["failure", "finished"], logs(run_dir)
    # Where the MPI of another rank notices first, mpirun does not report how the rank ended.
    sentences = (f"rank {rank} was killed by SIGKILL", f"rank {rank} ended without a report; then MPI on rank ")
    assert any(sentence in ends[0]["cause"] for sentence in sentences), ends[0]["cause"]
    assert ends[0]["time"] - killed < ENDS_WITHIN
    assert [record["step"] >= step for record in of_kind(run_dir, "resume")] == [True]
    assert of_run(run_dir) == []
    assert not [process for process in everyone if stays(process)], "zombies"
    assert not [path for path in memory if path.exists()]
    return run_dir


def segments(processes: Iterable[psutil.Process]) -> set[Path]:
    """Files in shared memory that processes have mapped."""
    found: set[Path] = set()
    for process in processes:
        maps = Path("/proc", str(process.pid), "maps")
        found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps.read_text(), re.MULTILINE)}
    return found


def stays(process: psutil.Process) -> bool:
    """Whether a process of an ended attempt is there after a while, also as a zombie."""
    end = time.monotonic() + GONE_WITHIN
    while process.is_running() and time.monotonic() < end:
        time.sleep(0.05)
    return process.is_running()
