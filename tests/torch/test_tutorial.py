"""docs/tutorials/pytorch.md: every command as the page prints it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from project import environment
from tutorials import commands, run_shell, write_files

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")


def test_from_a_script_to_a_run(tmp_path: Path) -> None:
    write_files("pytorch", tmp_path)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    lines = commands("pytorch")
    assert len(lines) == 7
    printed = {line: run_shell(line, tmp_path, environment(PATH=path, PYTHONWARNINGS="ignore")) for line in lines}
    assert "finished" in printed["ortflow status train"]
    assert "resumable" in printed["ortflow list"]
    assert "#SBATCH --nodes=2" in printed[lines[-1]]
    assert (tmp_path / "resumable.html").is_file()
    assert (tmp_path / "model.pt").is_file()
