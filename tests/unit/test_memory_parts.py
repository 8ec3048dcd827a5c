"""Every buffer of a rank is accounted for, before a run and behind it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from graph_build_models import linear
from typer.testing import CliRunner

from ortflow.cli.app import command_line
from ortflow.workflow.checkpoint.image import KEPT
from ortflow.workflow.memory import buffers, with_peak


def test_parts_of_adamw() -> None:
    assert buffers(100, 20, 2) == {"parameters": 480, "gradients": 400, "moments": 800, "checkpoint": 1280}
    assert buffers(100, 0, 0, accumulation=4, world_size=2) == {
        "parameters": 400, "gradients": 800, "moments": 0, "checkpoint": 200,
    }  # fmt: skip
    assert buffers(10**9, 0, 2)["checkpoint"] == KEPT


def test_what_is_no_buffer_is_the_rest_of_the_peak() -> None:
    assert with_peak({"parameters": 10, "gradients": 5}, 40) == {
        "parameters": 10, "gradients": 5, "values": 25, "peak": 40,
    }  # fmt: skip
    # In a process of its own, whose peak is not that of an earlier test.
    program = (
        "import numpy; from ortflow.workflow.memory import peak; before = peak(); "
        "held = numpy.ones(2 * before, numpy.uint8); assert peak() >= held.nbytes, (before, peak())"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_inspect_shows_them(tmp_path: Path) -> None:
    told = CliRunner().invoke(
        command_line(), ["inspect", str(linear(tmp_path / "m.onnx", width=4000, out=("batch", 250)))]
    )
    assert told.exit_code == 0, told.output
    (line,) = (line for line in told.output.splitlines() if line.startswith("memory"))
    assert "parameters 4.0 MB, gradients 4.0 MB, moments 8.0 MB, checkpoint 12 MB" in line
