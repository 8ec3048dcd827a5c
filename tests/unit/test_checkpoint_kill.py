from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import saving_process
from checkpoints import Rejections, newest_whole, save, state

from ortflow.workflow.checkpoint.load import load_newest
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.verify import verify

SCRIPT = saving_process.__file__


def saving(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, SCRIPT, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """kill -9 of a process that saves and prunes as fast as it can: checkpoints reported as committed are intact."""
    store, reported = DirectoryStore(tmp_path), 0
    moments, kills = random.Random(0), 0
    while kills < 20 or (reported <= 5 and kills < 400):  # on a busy machine most come before the first save
        kills += 1
        process = saving(str(tmp_path), str(reported + 1))
        time.sleep(moments.uniform(0, 0.08))
        process.kill()
        lines = process.communicate()[0].splitlines()
        reported = max([reported, *(int(line) for line in lines if line.isdigit())])
        assert not [line for line in lines if line.startswith("failed")]
        rejections = Rejections()
        found = load_newest(store, on_reject=rejections)
        assert {path.name for path in rejections.paths} <= {"COMMITTED"}
        if reported:
            assert found is not None
        if found is not None:
            assert found.manifest.step >= reported
            assert (found.buffers["parameters"] == found.manifest.step).all()
            reported = found.manifest.step
        for step in store.steps():
            assert {fault.path.name for fault in verify(store, step)} <= {"COMMITTED"}
    assert reported > 5
    store.clean()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{step:08d}" for step in store.steps()]
    assert [step for step in store.steps() if verify(store, step)] == []


def test_a_file_that_cannot_grow_fails_the_save_and_keeps_the_old_one(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 1, state(0))
    output = saving(str(tmp_path), "2", "60000").communicate()[0]
    assert output.startswith("failed File too large writing")
    assert "rank-0000.safetensors" in output
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert newest_whole(store) == 1


def on_small_disk(folder: Path, size: str, commands: str) -> str:
    """Run shell commands with a file system of `size` mounted on the folder in a private namespace."""
    shell = f"mount -t tmpfs -o size={size} none {folder} && {commands}"
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    run = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*run, f"mount -t tmpfs none {folder}"], capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    return subprocess.run([*run, shell], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("size", "filler"), [("300k", 0), ("440k", 20), ("440k", 16), ("440k", 12)])
def test_full_disk(tmp_path: Path, size: str, filler: int) -> None:
    """The first checkpoint takes 208 KiB; the second finds no space for its tensors, manifest or marker."""
    script = f"{sys.executable} {SCRIPT} {tmp_path}"
    output = on_small_disk(
        tmp_path,
        size,
        f"{script} 1 1000000 && dd if=/dev/zero of={tmp_path}/filler bs=1k count={filler} 2>/dev/null; "
        f"{script} 2 1000000; ls -a {tmp_path}; rm {tmp_path}/filler; {script} 3 1000000; ls {tmp_path}",
    )
    lines = output.split()
    assert lines[:3] == ["ready", "1", "ready"]
    assert "No space left on device" in output
    assert lines.count("step-00000001") >= 1
    assert "step-00000002" not in lines
    assert not [line for line in lines if line.startswith((".tmp", ".trash"))]
