"""What a kill leaves behind is gone when the run goes on, and nothing else is; the umask holds for what stays."""

from __future__ import annotations

import mmap
import os
import re
import stat
import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest
from project import ORTFLOW, environment, of_kind
from tiny_runs import RUN, STEPS, Tiny

from ortflow.workflow.comm.segments import FOLDER, sweep

PAIR = {"resources": {"ranks_per_node": 2, "cpus_per_rank": 1}}


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    found = psutil.Process(launcher.pid).children(recursive=True)
    return [one for one in found if "ortflow.workflow.rank" in one.cmdline() and "mpi" not in one.cmdline()[0]]


def segments(process: psutil.Process) -> set[str]:
    return set(re.findall(r"/dev/shm/(mpich_shm_\w+)", Path("/proc", str(process.pid), "maps").read_text()))


def test_killed_ranks_leave_no_shared_memory(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p", **PAIR, train={**RUN["train"], "steps": 100_000})
    launcher = tiny.start("run", "run.yaml")
    try:
        records = [tiny.run_dir / "events" / f"rank-{rank:04d}.jsonl" for rank in (0, 1)]
        while not all(path.exists() and of_kind(tiny.run_dir, "step", rank) for rank, path in enumerate(records)):
            assert launcher.poll() is None, launcher.communicate()
            time.sleep(0.05)
        mapped = {name for rank in ranks_of(launcher) for name in segments(rank)}
    finally:
        launcher.kill()
        launcher.communicate()
    if not mapped:
        pytest.skip("this MPI maps no segment of MPICH's")
    assert [name for name in mapped if (FOLDER / name).exists()] == []


def test_a_segment_that_is_mapped_in_a_moment_stays() -> None:
    """Another program of this user's, between making it and mapping it."""
    path = FOLDER / f"mpich_shm_{os.getpid():x}c_0"
    path.write_bytes(bytes(4096))
    kept: list[mmap.mmap] = []

    def maps_it() -> None:
        with path.open("r+b") as file:
            kept.append(mmap.mmap(file.fileno(), 4096))

    starting = threading.Timer(0.05, maps_it)
    try:
        starting.start()
        assert path.name not in sweep(time.time() - 1)
        assert path.exists()
    finally:
        starting.join()
        for each in kept:
            each.close()
        path.unlink(missing_ok=True)


def test_only_segments_that_nobody_maps_are_swept() -> None:
    before = time.time() - 0.5
    used, left = (FOLDER / f"mpich_shm_{os.getpid():x}{letter}_0" for letter in "ab")
    try:
        for path in (used, left):
            path.write_bytes(bytes(4096))
        with used.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert left.name not in sweep(time.time() + 60)
            assert left.exists()
            assert sweep(before, FOLDER).count(left.name) == 1
            assert used.exists()
        assert not left.exists()
    finally:
        used.unlink(missing_ok=True)
        left.unlink(missing_ok=True)


def test_temporaries_of_dead_attempts_go_and_all_else_stays(tmp_path: Path) -> None:
    tiny = Tiny.make(tmp_path / "p")
    assert tiny.command("run", "run.yaml", f"train.steps={STEPS // 2}").code == 0
    root = tiny.run_dir
    gone = [
        root / ".run.yaml.0123abcd", root / ".plan.json.a0-0123abcd", root / "graphs/.train.onnx.a0-0123abcd",
        root / "events/.rank-0000.jsonl.a12-0123abcd", root / "export/.model.onnx.abcd_123/model.onnx",
    ]  # fmt: skip
    kept = [root / ".stop.0123abcd", root / ".vimrc.original", root / "export/.model.onnx.abcd_124/notes.txt"]
    for path in (*gone, *kept):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    done = tiny.command("resume", "tiny", f"train.steps={STEPS}")
    assert done.code == 0, done.said
    assert [path for path in gone if path.exists()] == []
    assert not gone[-1].parent.exists()
    assert [path for path in kept if not path.exists()] == []


@pytest.mark.parametrize(("mask", "forbidden", "wanted"), [("077", 0o077, 0o600), ("002", 0o002, 0o660)])
def test_the_umask_holds(tmp_path: Path, mask: str, forbidden: int, wanted: int) -> None:
    tiny = Tiny.make(tmp_path / "p")
    subprocess.run(
        ["sh", "-c", f'umask {mask}; exec "$@"', "sh", *ORTFLOW, "run", "run.yaml"],
        cwd=tiny.folder, env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tiny.run_dir.rglob("*") if path.is_file()}
    assert len(modes) > 15
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & forbidden or mode & wanted != wanted} == {}
    folders = [path for path in tiny.run_dir.rglob("*") if path.is_dir()]
    assert [path for path in folders if stat.S_IMODE(path.stat().st_mode) & forbidden] == []
