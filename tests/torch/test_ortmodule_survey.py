"""Third-party models under ORTModule: three of the survey's, others for each state of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rotation import PART

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")

PROGRAM = Path(__file__).parent / "survey" / "ortmodule.py"


def test_models_of_the_survey() -> None:
    chosen = ["--part", PART, "--most", "3"] if PART else ["--only", "handwritten/hard-gates"]
    done = subprocess.run([sys.executable, str(PROGRAM), *chosen], capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert '"result"' in done.stdout
