"""Losses that do not fit the model: one sentence with the key, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from graph_build_models import linear, run_file

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.errors import UserError

WEIGHTS = "model.loss.class_weights"


@pytest.mark.parametrize(
    ("loss", "where", "words"),
    [
        ({"kind": "cross_entropy", "class_weights": [1.0, 2.0]}, WEIGHTS, "2 weights, and the output has 5 classes"),
        ({"kind": "focal", "class_weights": [0.0] * 5}, WEIGHTS, "one of them above 0"),
        ({"kind": "cross_entropy", "class_weights": "short.txt"}, WEIGHTS, "short.txt: has 3 weights"),
        ({"kind": "cross_entropy", "class_weights": "words.txt"}, WEIGHTS, "words.txt has no weights"),
        ({"kind": "cross_entropy", "class_weights": "absent.npy"}, WEIGHTS, "absent.npy has no weights"),
        ({"kind": "bce_with_logits", "pos_weight": [1.0, 2.0]}, "model.loss.pos_weight", "has 2 weights"),
        ({"kind": "quantile", "quantiles": [0.1, 0.9]}, "model.loss.quantiles", "has 2 quantiles"),
        ({"kind": "kl_div", "class_axis": 2}, "model.loss.class_axis", "has no axis 2"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, loss: dict[str, Any], where: str, words: str) -> None:
    (tmp_path / "short.txt").write_text("1\n2\n3\n")
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    if isinstance(loss.get("class_weights"), str):
        loss = loss | {"class_weights": str(tmp_path / loss["class_weights"])}
    with pytest.raises(UserError) as refused:
        build_graphs(run_file(linear(tmp_path / "m.onnx"), loss), tmp_path / "graphs")
    assert refused.value.where == where
    assert words in refused.value.what
    assert refused.value.fix
    assert not (tmp_path / "graphs").exists()
