"""Every buffer of a rank is accounted for, before and after a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from graph_build_models import linear
from messages import mentions
from typer.testing import CliRunner

from ortflow.cli.app import command_line
from ortflow.workflow.memory import KEPT, buffers, with_peak


def test_parts_of_adamw() -> None:
    assert buffers(100, 20, 2) == {"parameters": 480, "gradients": 400, "moments": 800, "checkpoint": 1280}
    assert buffers(100, 0, 0, accumulation=4, world_size=2) == {
        "parameters": 400, "gradients": 800, "moments": 0, "checkpoint": 200,
    }  # fmt: skip
    assert buffers(10**9, 0, 2)["checkpoint"] == KEPT
    assert buffers(10**9, 0, 2, copied=None, world_size=4)["checkpoint"] == 3 * 10**9
    # Several stages of one rank may have gradients of the same weight.
    assert [buffers(100, 0, 0, chunks=2, accumulation=each)["gradients"] for each in (1, 4)] == [800, 800]


def test_parts_under_zero() -> None:
    """Of 640 parameters, 3 ranks have 256, 256 and 128."""
    for rank, mine in enumerate((256, 256, 128)):
        held = [buffers(640, 64, 2, accumulation=2, world_size=3, zero=stage, rank=rank) for stage in range(3)]
        assert [parts["moments"] for parts in held] == [8 * 640, 8 * mine, 8 * mine]
        assert [parts["gradients"] for parts in held] == [4 * 1280, 4 * 1280, 4 * (640 + mine)]
        assert len({(parts["parameters"], parts["checkpoint"]) for parts in held}) == 1
    assert buffers(640, 0, 1, world_size=3, zero=2)["gradients"] == 4 * 640


def test_parts_under_stage_3() -> None:
    """Of 640 trained elements 3 ranks have 256, 256 and 128; of 704 in all they save 256, 256 and 192."""
    for rank, (mine, saved) in enumerate(((256, 256), (256, 256), (128, 192))):
        held = buffers(640, 64, 2, accumulation=2, world_size=3, zero=3, rank=rank, messages=10)
        assert held["parameters"] == 4 * (mine + 64 + saved)
        assert (held["gradients"], held["moments"], held["messages"]) == (4 * mine, 8 * mine, 40)
        assert held["checkpoint"] == buffers(640, 64, 2, world_size=3)["checkpoint"]
        assert buffers(640, 0, 2, world_size=3, zero=3, rank=rank)["parameters"] == 4 * mine


def test_values_are_the_rest_of_the_peak() -> None:
    assert with_peak({"parameters": 10, "gradients": 5}, 40) == {
        "parameters": 10, "gradients": 5, "values": 25, "peak": 40,
    }  # fmt: skip
    measured = {"gpu_buffers": 16, "gpu_peak": 100}
    on_gpu = with_peak({"parameters": 10, "gradients": 5, "checkpoint": 7, "offloaded": 9}, 40, measured)
    assert (on_gpu["values"], on_gpu["peak"], on_gpu["gpu_buffers"], on_gpu["gpu_peak"]) == (85, 40, 16, 100)
    # In a separate process. A shell starts it: on Linux a program begins with the peak of the process that starts it,
    # which is gigabytes behind other tests.
    program = (
        "import numpy; from ortflow.workflow.memory import peak; before = peak(); "
        "held = numpy.ones(2 * before, numpy.uint8); assert peak() >= held.nbytes, (before, peak())"
    )
    subprocess.run(["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, program], check=True)


def test_inspect_shows_them(tmp_path: Path) -> None:
    reported = CliRunner().invoke(
        command_line(), ["inspect", str(linear(tmp_path / "m.onnx", width=4000, out=("batch", 250)))]
    )
    assert reported.exit_code == 0, reported.output
    (line,) = (line for line in reported.output.splitlines() if line.startswith("memory"))
    assert mentions(line, "parameters 4.0 MB … gradients 4.0 MB … moments 8.0 MB … checkpoint 12 MB")
