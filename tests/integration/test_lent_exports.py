"""Exports of runs whose rank 0 reads parameters from the others: the right file, on a full disk, after a kill."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from full_disks import fill, until_reported
from kernels import needs_kernels
from onnx import numpy_helper
from project import leftovers, logs, of_kind
from tiny_runs import Tiny, has_traceback, is_root

from ortflow.workflow.run.rundir import RunDir

pytestmark = [needs_kernels, pytest.mark.rotates("lent exports")]
FAULTS = str(Path(__file__).parent.parent / "support" / "faults")
MODEL = Path("export", "model.onnx")
SHAPES: dict[str, dict[str, Any]] = {
    "sharded": {"resources": {"ranks_per_node": 3, "cpus_per_rank": 1}, "parallel": {"zero": 3}},
    # Two runs that time the nodes of the model themselves may be cut at different places.
    "stages": {"resources": {"ranks_per_node": 2, "cpus_per_rank": 1}, "parallel": {"pipeline": 2, "cuts": [["r"]]}},
}


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHAPES[request.param]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)]
    if not is_root() or subprocess.run(mount, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def trained(folder: Path, shape: dict[str, Any]) -> Tiny:
    tiny = Tiny.make(folder, **shape)
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said + logs(tiny.run_dir)
    return tiny


def test_a_run_and_its_checkpoint_export_the_same_bytes(shape: dict[str, Any], tmp_path: Path) -> None:
    tiny = trained(tmp_path / "run", shape)
    (exported,) = of_kind(tiny.run_dir, "export")
    assert 0 <= exported["max_difference"] < 1e-5
    done = tiny.command("export", "tiny", "--output", "again.onnx")
    assert done.code == 0, done.said
    assert (tiny.folder / "again.onnx").read_bytes() == (tiny.run_dir / MODEL).read_bytes()
    weights = {t.name: numpy_helper.to_array(t) for t in onnx.load(tiny.run_dir / MODEL).graph.initializer}
    assert weights["mean"].any()  # running statistics are exported, too
    assert not np.array_equal(
        weights["w"], numpy_helper.to_array(onnx.load(tiny.folder / "model.onnx").graph.initializer[0])
    )
    assert sorted(path.name for path in (tiny.run_dir / "export").iterdir()) == ["model.onnx"]


def test_a_disk_that_is_full_when_rank_0_exports_costs_nothing(
    shape: dict[str, Any], disk: Path, tmp_path: Path
) -> None:
    whole = trained(tmp_path / "whole", shape)
    tiny = Tiny.make(disk / "p", **shape)
    child = tiny.start("run", "run.yaml", PYTHONPATH=FAULTS, HOLD="export 5")
    record = tiny.run_dir / "events" / "rank-0000.jsonl"
    while not record.exists() or '"phase":"export"' not in record.read_text():
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    filler = fill(disk)
    assert "out of disk on" in str(until_reported(tiny, child).waits)
    assert not (tiny.run_dir / "export").exists()
    filler.unlink()
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, out + err
    assert not has_traceback(out + err)
    assert (tiny.run_dir / MODEL).read_bytes() == (whole.run_dir / MODEL).read_bytes()
    assert [record["event"] for record in RunDir(tiny.run_dir).read_attempts()] == ["submit", "start", "end"]


def test_a_rank_that_is_killed_while_it_lends_ends_the_attempt_and_the_next_exports(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    whole, tiny = trained(tmp_path / "whole", shape), Tiny.make(tmp_path / "killed", **shape)
    done = tiny.command("run", "run.yaml", PYTHONPATH=FAULTS, LENDER="1 3", timeout=120)
    assert done.code == 0, done.said + logs(tiny.run_dir)
    ends = [record for record in RunDir(tiny.run_dir).read_attempts() if "outcome" in record]
    assert [end["outcome"] for end in ends] == ["failure", "finished"]
    assert "rank 1 was killed by SIGKILL" in ends[0]["cause"]
    assert (tiny.run_dir / MODEL).read_bytes() == (whole.run_dir / MODEL).read_bytes()
    assert sorted(path.name for path in (tiny.run_dir / "export").iterdir()) == ["model.onnx"]
    assert leftovers(tiny.run_dir) == []
