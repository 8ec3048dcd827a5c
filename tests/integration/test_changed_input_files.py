"""A file that the run file names changes between two attempts: the run is refused, or the change is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tiny_runs import RUN, Tiny

from ortflow.workflow.rundir import RunDir

FUNCTION = "def scaled(x, random):\n    return x * x.dtype.type({})\n"


def test_the_run_continues_with_the_same_files_alone(tmp_path: Path) -> None:
    (tmp_path / "change.py").write_text(FUNCTION.format(0.5))
    (tmp_path / "of_eval.py").write_text(FUNCTION.format(1))
    np.save(tmp_path / "weights.npy", np.array([1, 2, 3], np.float32))
    tiny = Tiny.make(
        tmp_path,
        model={"path": "model.onnx", "loss": {**RUN["model"]["loss"], "class_weights": "weights.npy"}},
        data={
            "train": {"path": "set.arrow", "transforms": [{"column": "x", "function": "change.py:scaled"}]},
            "eval": {"path": "set.arrow", "transforms": [{"column": "x", "function": "of_eval.py:scaled"}]},
            "micro_batch": 4,
        },
    )
    assert tiny.command("run", "run.yaml", "train.steps=6").code == 0

    def refused(name: str, key: str, changed: bytes) -> None:
        path = tmp_path / name
        original = path.read_bytes()
        path.write_bytes(changed)
        done = tiny.command("run", "run.yaml")
        assert done.code == 2, done.said
        assert f"{key}: {path} has changed since this run began" in done.said
        assert "restore it, start from the beginning with --fresh" in done.said
        path.write_bytes(original)

    refused("change.py", "data.train.transforms[0].function", FUNCTION.format(0.25).encode())
    np.save(tmp_path / "others.npy", np.array([1, 2, 4], np.float32))
    refused("weights.npy", "model.loss.class_weights", (tmp_path / "others.npy").read_bytes())
    (tmp_path / "of_eval.py").write_text(FUNCTION.format(2))
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    run = RunDir(tiny.run_dir)
    events = run.events(0).read_text() + "".join(path.read_text() for path in run.root.rglob("rank-0000.log"))
    assert "data.eval.transforms[0].function: " in events
