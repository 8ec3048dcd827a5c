"""Third-party models under ORTModule: three of the survey's, others for each state of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rotation import PART

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")

PROGRAM = Path(__file__).parent / "survey"


def test_models_of_the_survey() -> None:
    chosen = ["--part", PART, "--most", "3"] if PART else ["--only", "handwritten/experts"]
    command = [sys.executable, str(PROGRAM), "--ortmodule", *chosen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 wrong" in done.stdout
