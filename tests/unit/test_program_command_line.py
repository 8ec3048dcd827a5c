"""Words on the command line that are the program's, or that belong to another kind of file: what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import command_here

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
