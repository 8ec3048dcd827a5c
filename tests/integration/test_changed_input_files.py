"""A file that the run file names changes between two attempts: the run is refused, or the change is said."""

from __future__ import annotations

from pathlib import Path

from project import of_kind
from tiny_runs import Tiny

FUNCTION = "def scaled(x, random):\n    return x * x.dtype.type({})\n"


def test_the_run_continues_with_the_same_transform_alone(tmp_path: Path) -> None:
    trained, evaluated = tmp_path / "change.py", tmp_path / "of_eval.py"
    trained.write_text(FUNCTION.format(0.5))
    evaluated.write_text(FUNCTION.format(1))
    tiny = Tiny.make(
        tmp_path,
        data={
            "train": {"path": "set.arrow", "transforms": [{"column": "x", "function": "change.py:scaled"}]},
            "eval": {"path": "set.arrow", "transforms": [{"column": "x", "function": "of_eval.py:scaled"}]},
            "micro_batch": 4,
        },
    )
    assert tiny.command("run", "run.yaml", "train.steps=6").code == 0
    trained.write_text(FUNCTION.format(0.25))
    done = tiny.command("run", "run.yaml")
    assert done.code == 2, done.said
    assert f"data.train.transforms[0].function: {trained} has changed since this run began" in done.said
    assert "restore it, start from the beginning with --fresh" in done.said
    trained.write_text(FUNCTION.format(0.5))
    evaluated.write_text(FUNCTION.format(2))
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    (warning,) = of_kind(tiny.run_dir, "warning")
    assert warning["message"].startswith(f"data.eval.transforms[0].function: {evaluated} has changed")
