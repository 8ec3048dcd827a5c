"""Modules beside a run file or in a run directory, named like those of Python's library or of packages, are not run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from project import environment
from tiny_runs import Tiny

SCRIPT = Path(sys.executable).with_name("ortflow")
"""The installed command: `python -m ortflow` would itself import from the current folder, as every `python -m` does."""
PACKAGES = ("numpy", "onnx", "onnxruntime", "mpi4py", "pyarrow", "yaml", "psutil", "ortflow", "sitecustomize")
NAMES = sorted({*PACKAGES, *(name for name in sys.stdlib_module_names if not name.startswith("__"))})


def plant(folder: Path, mark: Path) -> None:
    """Modules that record that they were imported."""
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"with open({str(mark)!r}, 'a') as mark: mark.write({name!r} + '\\n')\n")


def ortflow(tiny: Tiny, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPT), *arguments], cwd=tiny.folder, env=environment(), capture_output=True, text=True, timeout=120,
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def finished(tiny: Tiny) -> bool:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        done = ortflow(tiny, "status", "tiny")
        if "finished" in done.stdout or "lost" in done.stdout:
            return "finished" in done.stdout
        time.sleep(0.5)
    return False


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_rank_and_no_supervisor_imports_from_the_folders_of_a_run(tmp_path: Path, ranks: int) -> None:
    tiny, mark = Tiny.make(tmp_path / "run", resources={"ranks_per_node": ranks, "cpus_per_rank": 1}), tmp_path / "mark"
    plant(tiny.folder, mark)
    done = ortflow(tiny, "run", "run.yaml", "train.steps=3")
    assert done.returncode == 0, done.stderr
    plant(tiny.run_dir, mark)
    # As received from somebody else, and started in the background from the folder itself.
    done = ortflow(tiny, "resume", "tiny", "train.steps=6", "--detach")
    assert done.returncode == 0, done.stderr
    assert finished(tiny), (tiny.run_dir / "logs" / "supervisor.log").read_text()
    assert not mark.exists(), mark.read_text()
