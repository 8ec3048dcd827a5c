"""The moments of a proof, and the comparison of two ONNX runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import save

from ortflow.launchers.proving.checkpoints import differences
from ortflow.launchers.proving.prove import SIGNALS, schedule
from ortflow.launchers.proving.runs import MARKER, folder_of_runs
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.run.rundir import RunDir


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("steps", [6, 7, 12, 100])
def test_a_run_is_struck_after_its_first_checkpoint_and_before_its_last_steps(steps: int, seed: int) -> None:
    moments = schedule(steps, seed, 3)
    assert moments == schedule(steps, seed, 3)
    for name in SIGNALS:
        plan = moments.plan(name)
        assert plan.signal == SIGNALS[name]
        assert 2 <= plan.step <= steps - 2
        assert 0 <= plan.rank < 3
    assert moments.strikes["killed"][0] > moments.period
    assert moments.plan("calm").signal is None


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(UserError, match=r"5 steps are too few.*--steps"):
        schedule(5, 0, 1)


def test_the_folder_of_a_proof_loses_only_its_runs(tmp_path: Path) -> None:
    run, folder = RunDir(tmp_path / "runs" / "a"), tmp_path / "runs" / "a.prove"
    with folder_of_runs(run) as made:
        assert made == folder
        (folder / "calm" / "trace").mkdir(parents=True)
    assert not (tmp_path / "runs").exists()
    with folder_of_runs(run):
        (folder / "calm" / "trace").mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / MARKER).touch()
    with pytest.raises(UserError, match=r"notes\.txt is not of"), folder_of_runs(run):
        raise AssertionError("a folder with other files")
    assert (folder / "notes.txt").read_text() == "mine"


def run_with(root: Path, losses: list[float], weights: list[float], step: int = 4) -> RunDir:
    """A run directory with a curve and a checkpoint."""
    run = RunDir(root)
    run.events(0).parent.mkdir(parents=True)
    records = [
        {
            "event": "step",
            "time": 1.0,
            "attempt": 0,
            "rank": 0,
            "step": number + 1,
            "loss": loss,
            "seconds": np.random.rand(),
        }
        for number, loss in enumerate(losses)
    ]
    run.events(0).write_text("".join(json.dumps(record) + "\n" for record in records))
    index = FlatIndex.place([Tensor("weight", (len(weights),), "decay")])
    buffers = {"parameters": HostBuffer(np.array(weights)), "moments": HostBuffer(np.zeros(3))}
    save(DirectoryStore(root / "checkpoints"), step, buffers, index=index)
    return run


def test_curves_and_tensors_are_compared_bit_by_bit(tmp_path: Path) -> None:
    calm = run_with(tmp_path / "calm", [0.5, 0.25], [1.0, 2.0])
    assert differences(calm, run_with(tmp_path / "equal", [0.5, 0.25], [1.0, 2.0])) == []
    (line,) = differences(calm, run_with(tmp_path / "curve", [0.5, np.nextafter(0.25, 1).item()], [1.0, 2.0]))
    assert line.startswith("loss of step 2 is 0.25000000000000006, and 0.25")
    (line,) = differences(calm, run_with(tmp_path / "bit", [0.5, 0.25], [1.0, np.nextafter(2.0, 3).item()]))
    assert line == "parameters in rank-0000.safetensors differs"
    (line,) = differences(calm, run_with(tmp_path / "short", [0.5, 0.25], [1.0, 2.0], step=3))
    assert "last checkpoint is that of step 3, and 4" in line


def test_a_missing_step_is_a_difference(tmp_path: Path) -> None:
    calm = run_with(tmp_path / "calm", [0.5, 0.25], [1.0])
    (line,) = differences(calm, run_with(tmp_path / "other", [0.5], [1.0]))
    assert "step 2 is None" in line


def test_tensors_of_another_shape_or_a_missing_file_differ(tmp_path: Path) -> None:
    calm = run_with(tmp_path / "calm", [0.5], [1.0, 2.0])
    (line,) = differences(calm, run_with(tmp_path / "shape", [0.5], [1.0, 2.0, 3.0]))
    assert "step 4 has other tensors or ranks" in line
    less = run_with(tmp_path / "less", [0.5], [1.0, 2.0])
    (less.root / "checkpoints/step-00000004/rank-0001.safetensors").unlink()
    assert differences(calm, less) == ["the file in rank-0001.safetensors differs"]
    (less.root / "checkpoints/step-00000004/COMMITTED").unlink()
    (line,) = differences(calm, less)
    assert "the last checkpoint cannot be compared" in line
