"""The command line without a rank's packages: what a laptop with any CPython has after `pip install ortflow`.

Skipped where ONNX Runtime is installed; `.ci/run` runs it in a separate environment, with the newest CPython.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is not None, reason="needs an environment without onnxruntime"
)
RUN = """
name: plain
model: {path: model.onnx, loss: cross_entropy}
data: {train: train.arrow, micro_batch: 4}
train: {steps: 10, optimizer: {name: adamw, lr: 1e-3}}
resources: {ranks_per_node: 2}
"""


def ortflow(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ortflow", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def test_no_heavy_package_is_there() -> None:
    for name in ("numpy", "onnx", "onnxruntime", "pyarrow", "mpi4py", "safetensors"):
        assert importlib.util.find_spec(name) is None, name


def test_help_and_version(tmp_path: Path) -> None:
    for arguments in (["--help"], ["--version"], ["run", "--help"], ["data", "--help"], ["checkpoint", "--help"]):
        done = ortflow(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_validate_reports_the_faults_of_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("steps: 10", "stepps: 10"))
    done = ortflow("validate", "run.yaml", folder=tmp_path)
    assert done.returncode == 2
    assert "did you mean steps?" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_render_prints_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    done = ortflow("render", "--backend", "local", "run.yaml", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ortflow.workflow.rank" in done.stdout
    assert sys.executable in done.stdout


def test_the_schema_of_the_run_file(tmp_path: Path) -> None:
    done = ortflow("schema", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "properties" in json.loads(done.stdout)


def test_list_and_status_need_nothing(tmp_path: Path) -> None:
    done = ortflow("list", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    done = ortflow("status", "nobody", folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["inspect", "model.onnx"], ["data", "show", "x.arrow"], ["data", "convert", "x.npy", "--output", "y"]]
)
def test_what_needs_a_ranks_part_names_the_command(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    done = ortflow(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "pip install 'ortflow[train]'" in done.stderr


def test_a_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "model.onnx").write_bytes(b"")
    (tmp_path / "train.arrow").write_bytes(b"")
    done = ortflow("run", "run.yaml", folder=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
