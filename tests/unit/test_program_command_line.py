"""Words on the command line that are the program's, or that belong to another kind of file: what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import command_here

from ortflow.cli.status import describe
from ortflow.launchers.status import read_status
from ortflow.workflow.run.rundir import RunDir

START = {"event": "start", "attempt": 0, "time": 1.0}
RUN_FILE = "name: train\nprogram: {script: train.py}\n"


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        ("run train.py --lr 3", "`ortflow run` has no option --lr; put the program's arguments behind `--`: train.py"),
        ("submit -b slurm train.py --lr 3", "`ortflow submit` has no option --lr; put the program's arguments behind"),
        ("run train.py lr=3", "'lr=3' sets no key of the run file of a program; put the program's arguments behind"),
        ("run train.yaml -- --lr 3", "train.yaml is a run file; write program.args='--lr 3'"),
        ("validate train.py", "is a Python program, not a run file; start it with `ortflow run`"),
        ("inspect train.yaml", "train.yaml is a run file, not an ONNX model; name the .onnx file"),
    ],
)  # fmt: skip
def test_what_to_do_is_said(words: str, reported: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "train.yaml").write_text(RUN_FILE)
    done = command_here(*words.split(), folder=tmp_path)
    assert done.returncode == 2
    assert reported in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["render", "doctor"])
def test_an_override_may_be_longer_than_the_name_of_a_file(verb: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "train.yaml").write_text(RUN_FILE)
    done = command_here(verb, "train.yaml", f'program.env={{"NAMES": "{"x" * 4000}"}}', folder=tmp_path)
    assert "too long" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("alive", [True, False])
def test_a_lost_run_has_a_next_step(alive: bool) -> None:
    rows = dict(describe(read_status(RunDir(Path("/nowhere/gpt")), records=[START], alive=alive), 2.0))
    assert rows["state"] == ("running" if alive else "lost")
    assert rows.get("next") == (None if alive else "`ortflow resume` continues")
    assert rows["attempts"] == "1 (counted: 0 failures, 0 preemptions)"
