"""What `import ortflow` costs, and the message for a user without PyTorch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ortflow
from ortflow.workflow.errors import UserError


def test_import_brings_no_heavy_module() -> None:
    heavy = "{'torch', 'onnx', 'onnxruntime', 'numpy', 'ortflow.export'}"
    program = f"import sys, ortflow; print(set(sys.modules) & {heavy})"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'export_for_trainin'"):
        ortflow.export_for_trainin  # noqa: B018


@pytest.mark.parametrize("missing", ["torch.onnx", "onnxscript"])
def test_pytorch_missing(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in ("torch.onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else sys)
    monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.raises(UserError, match=r"torch and onnxscript.*pip install"):
        ortflow.export_for_training(None, (), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
