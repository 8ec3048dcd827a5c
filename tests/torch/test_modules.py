"""Small modules train as in PyTorch: evaluation loss, every gradient, five steps, against double precision."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import module_models
from case import Case
from following import distances

CASES = [*module_models.convolutions(), *module_models.products(), *module_models.mixtures()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_module_follows_pytorch(case: Case, tmp_path: Path) -> None:
    assert [distance for distance in distances(case, tmp_path) if distance.wrong] == []
