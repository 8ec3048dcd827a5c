"""Every part of ortflow uses the table of metrics: checks, graphs, totals, early stop, sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from graph_build_models import built, linear, run_file, save_model, value
from onnx import helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.objective.metrics import with_outputs
from ortflow.workflow.progress import Progress
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.metrics import METRICS, Metric, Watched, higher_is_better, perplexity
from ortflow.workflow.spec.train import EarlyStop
from ortflow.workflow.steps.early_stop import judge

LOSSES = ("cross_entropy", "bce_with_logits", "mse", "l1", "output")


def test_every_metric_has_a_way_to_its_value() -> None:
    assert tuple(METRICS) == get_args(Metric)
    assert get_args(Watched) == ("loss", *METRICS)
    for name, known in METRICS.items():
        assert set(known.losses) <= set(LOSSES)
        assert (known.of_loss is None) == (with_outputs([name]) == (name,))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("metric", METRICS)
def test_checks_and_graphs_agree_on_what_a_loss_has(metric: Metric, kind: str, tmp_path: Path) -> None:
    if kind == "output":
        nodes = [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0),
        ]
        ends = [value("x", ["batch", 4])], [value("mean", [])]
        model = save_model(tmp_path / "m.onnx", nodes, *ends, {"w": np.ones((4, 2), np.float32)})
        loss = {"kind": kind, "output": "mean"}
    else:
        model, loss = linear(tmp_path / "m.onnx"), {"kind": kind}
    accepted = kind in METRICS[metric].losses
    assert (check(run_file(model, loss, model__metrics=[metric])) == []) == accepted
    if accepted:
        assert built(model, loss, model__metrics=[metric]).metrics == with_outputs([metric])
    else:
        with pytest.raises(UserError, match=f"{metric}.* for the losses .* {kind}"):
            built(model, loss, model__metrics=[metric])


@pytest.mark.parametrize("metric", get_args(Watched))
def test_early_stop_goes_by_the_table(metric: Watched) -> None:
    assert higher_is_better(metric) == (metric != "loss" and METRICS[metric].higher_is_better)
    rule, falling = EarlyStop(metric=metric, patience=1), (0.5, 0.4)
    progress = Progress()
    assert [judge(rule, progress, number) for number in falling] == [False, higher_is_better(metric)]


def test_perplexity_of_any_loss_is_a_number() -> None:
    assert perplexity(1.5) == math.exp(1.5)
    assert math.isfinite(perplexity(1e9))
    assert math.isnan(perplexity(math.nan))
