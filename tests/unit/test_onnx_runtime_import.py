"""ONNX Runtime is imported without PyTorch, by any of ortflow's modules."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ortflow.workflow.onnx_runtime as shared
from ortflow.workflow.system.runtimes import TRAINING, installed_runtime

ROOM = Path(shared.__file__).parent
SPY = "import os, sys\nopen(os.environ['SPY'], 'a').write(' '.join(sys.argv) + chr(10))\nraise ImportError('a spy')\n"


@pytest.fixture
def spied(tmp_path: Path) -> dict[str, str]:
    """An environment in which a fake package `torch` comes first and records each import."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SPY)
    return {**os.environ, "PYTHONPATH": str(package.parent), "SPY": str(tmp_path / "imports")}


def run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, cwd="/"
    )
    return done.stdout.strip()


def test_onnx_runtime_is_imported_without_torch(spied: dict[str, str]) -> None:
    if installed_runtime() in TRAINING:
        run("import onnxruntime", spied)
        assert Path(spied["SPY"]).exists(), "the wheel no longer imports torch: this module can be removed"
        Path(spied["SPY"]).unlink()
    run("import ortflow.workflow.onnx_runtime, ortflow.workflow.executor, ortflow.workflow.trainer.step", spied)
    assert not Path(spied["SPY"]).exists()


@pytest.mark.skipif(installed_runtime() not in TRAINING, reason="needs the training package")
def test_the_front_end_can_be_imported_afterwards(spied: dict[str, str]) -> None:
    code = (
        "import sys, ortflow.workflow.onnx_runtime\n"
        "assert 'onnxruntime.training' not in sys.modules\n"
        "try: import onnxruntime.training.ortmodule\n"
        "except ImportError as error: print(error)"
    )
    assert "spy" in run(code, spied)


TOOLS = ("onnxruntime.quantization", "onnxruntime.transformers.float16")
"""Tools beside the runtime, which the module for exports imports after it."""


def test_one_module_alone_imports_onnx_runtime() -> None:
    found = [
        path.name
        for folder in (ROOM, ROOM.parent / "launchers", ROOM.parent / "ortflow")
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name.partition(".")[0] == "onnxruntime" and name not in TOOLS
    ]
    assert set(found) == {"onnx_runtime.py"}


def test_tests_import_it_from_there_too() -> None:
    """Or each rank that a test starts spends a third of its start on the search for PyTorch."""
    paths = Path(__file__).parent.parent.rglob("*.py")
    assert [path for path in paths if re.search(r"^ *(import|from) onnxruntime\b", path.read_text(), re.M)] == []
