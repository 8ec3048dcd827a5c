"""Runs whose loss takes probabilities for logits, in a form that nodes do not show, say so under every layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from data_sets import write_batches
from kernels import needs_kernels
from messages import mentions
from onnx import helper
from project import logs, of_kind
from tiny_runs import RUN, Tiny

pytestmark = pytest.mark.rotates
SHORT = {**RUN["train"], "steps": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "sharded": {"resources": {"ranks_per_node": 2, "cpus_per_rank": 1}, "parallel": {"zero": 3}},
    "stages": {"resources": {"ranks_per_node": 2, "cpus_per_rank": 1}, "parallel": {"pipeline": 2, "cuts": [["r"]]}},
}


def ended_by(tiny: Tiny, *operators: str) -> Tiny:
    """The model with these operators behind its logits."""
    file = tiny.folder / "model.onnx"
    model = onnx.load(file)
    names = ["y", *(f"p{place}" for place in range(len(operators)))]
    for place, op in enumerate(operators):
        inputs = [names[place]] * (2 if op == "Max" else 1)
        model.graph.node.append(helper.make_node(op, inputs, [names[place + 1]]))
    model.graph.output[0].name = names[-1]
    onnx.save(model, file)
    return tiny


def warnings_of(tiny: Tiny) -> Sequence[str]:
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said + logs(tiny.run_dir)
    return [record["message"] for record in of_kind(tiny.run_dir, "warning") if "takes logits" in record["message"]]


@pytest.mark.parametrize("layout", [pytest.param(each, marks=needs_kernels, id=key) for key, each in LAYOUTS.items()])
def test_a_softmax_behind_another_operator(layout: dict[str, Any], tmp_path: Path) -> None:
    tiny = ended_by(Tiny.make(tmp_path, train=SHORT, **layout), "Softmax", "Max")
    (warning,) = warnings_of(tiny)
    assert mentions(warning, "'p1'", "0", "1", "sum to 1", "cross_entropy", "model.loss.output")


@pytest.mark.parametrize("operators", [[], ["Sigmoid"], ["Softmax"]], ids=["logits", "no distribution", "recognised"])
def test_outputs_that_are_no_probabilities_or_recognised(operators: list[str], tmp_path: Path) -> None:
    assert not warnings_of(ended_by(Tiny.make(tmp_path, train=SHORT), *operators))


@pytest.mark.parametrize(("operators", "count"), [(["Sigmoid", "Max"], 1), (["Sigmoid"], 0), ([], 0)])
def test_binary_cross_entropy(operators: list[str], count: int, tmp_path: Path) -> None:
    loss = {"path": "model.onnx", "loss": {"kind": "bce_with_logits", "label": "labels"}}
    tiny = ended_by(Tiny.make(tmp_path, train=SHORT, model=loss), *operators)
    random = np.random.default_rng(1)
    labels = random.integers(0, 2, (64, 3)).astype(np.float32)
    (tiny.folder / "set.arrow").unlink()
    write_batches(tiny.folder / "set.arrow", {"x": random.normal(size=(64, 5)).astype(np.float32), "labels": labels})
    warnings = warnings_of(tiny)
    assert len(warnings) == count
    assert all(mentions(each, "'p1'", "0", "1", "bce_with_logits", "model.loss.output") for each in warnings)
