"""Every part of ortflow uses the table of metrics: checks, graphs, totals, early stop, sweeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

import pytest
from graph_build_models import built, linear, run_file

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.objective.metrics import with_outputs
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.metrics import METRICS, Metric, MetricSection, higher_is_better, perplexity
from ortflow.workflow.spec.train import EarlyStop
from ortflow.workflow.steps.early_stop import judge

LOSSES = ("cross_entropy", "bce_with_logits", "mse", "l1", "output", "kl_div")
TASKS = {"cross_entropy": "classes", "bce_with_logits": "targets", "mse": "values", "l1": "values"}


def metric(name: str, **options: str) -> MetricSection:
    return MetricSection.model_validate({"name": name, **options})


def test_every_metric_has_a_way_to_its_value() -> None:
    assert tuple(METRICS) == get_args(Metric)
    for name, known in METRICS.items():
        assert known.losses <= set(LOSSES)
        assert bool(known.tasks) == (known.of_loss is None)
        assert (known.of_loss is None) == (with_outputs([metric(name)]) == (metric(name).key,))


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("name", [name for name in METRICS if name != "graph"])
def test_checks_go_by_the_table(name: str, kind: str) -> None:
    loss = {"kind": kind, "output": "mean"} if kind == "output" else {"kind": kind}
    known = METRICS[name]
    accepted = kind in known.losses if known.of_loss else TASKS.get(kind) in known.tasks
    problems = check(run_file(Path("m.onnx"), loss, model__metrics=[name]))
    assert [problem.path for problem in problems] == ([] if accepted else [("model", "metrics", 0)])
    assert all(problem.what.startswith(f"is {name}, which ") for problem in problems)


@pytest.mark.parametrize(("loss", "accepted"), [({"kind": "cross_entropy"}, True), ({"kind": "mse"}, False)])
def test_graphs_go_by_the_table(loss: dict[str, str], accepted: bool, tmp_path: Path) -> None:
    model = linear(tmp_path / "m.onnx")
    if accepted:
        assert built(model, loss, model__metrics=["accuracy", "perplexity"]).metrics == ("accuracy",)
        return
    with pytest.raises(UserError, match="is accuracy, which compares numbers of classes or targets"):
        built(model, loss, model__metrics=["accuracy"])


@pytest.mark.parametrize("name", ["loss", *METRICS, "f1_macro", "top_5", "f1_micro.logits", "val/auroc", "val/loss"])
def test_early_stop_goes_by_the_table(name: str) -> None:
    plain = name.rpartition("/")[2].partition("_m")[0].replace("top_5", "top_k")
    plain = name if name in METRICS else plain
    assert higher_is_better(name) == (plain != "loss" and METRICS[plain].higher_is_better)
    rule, falling = EarlyStop(metric=name, patience=1), (0.5, 0.4)
    progress = Progress()
    assert [judge(rule, progress, number) for number in falling] == [False, higher_is_better(name)]


def test_the_direction_of_a_graph_is_the_users() -> None:
    own = metric("graph", path="scores/worst.onnx", better="higher")
    assert (own.key, higher_is_better("worst", [own]), higher_is_better("worst")) == ("worst", True, False)
    rule, progress = EarlyStop(metric="worst", patience=1), Progress()
    assert [judge(rule, progress, number, "", [own]) for number in (0.4, 0.5)] == [False, False]


def test_perplexity_of_any_loss_is_a_number() -> None:
    assert perplexity(1.5) == math.exp(1.5)
    assert math.isfinite(perplexity(1e9))
    assert math.isnan(perplexity(math.nan))
