"""Averaged weights, named evaluation sets and what compares their results, in one run of two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from data_sets import write_batches
from in_process import command_here
from onnx import numpy_helper
from project import of_kind
from safetensors.numpy import load_file
from tiny_runs import RUN, Tiny

from ortflow.workflow.steps.not_finite import is_comparable
from ortflow.workflow.weights.sources import open_weights

METRICS = ["accuracy", "f1", "auroc", "confusion_matrix"]
EVERY = {"every_steps": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A run with an evaluation set of one class, whose AUROC is NaN at every evaluation."""
    tiny = Tiny.make(
        tmp_path_factory.mktemp("together"),
        model={
            "path": "model.onnx",
            "loss": {**RUN["model"]["loss"], "class_weights": [1, 2, 0.5]},
            "metrics": METRICS,
        },
        data={
            **RUN["data"],
            "eval": "held.arrow",
            "eval_mode": "replicated",
            "eval_sets": {"one": {"path": "one.arrow"}},
        },
        train={
            "steps": 40,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "groups": [{"match": ["w", "b"], "lr_scale": 0.1, "frozen_until": "4 steps"}],
            "average": {"name": "ema", "decay": 0.9},
            "schedule": {"name": "reduce_on_plateau", "metric": "one/f1", "patience": 1, "min_delta": 1.0},
            "early_stop": {"metric": "one/f1", "patience": 4, "min_delta": 1.0},
            "evaluation": EVERY,
        },
        checkpoint={"best": {"metric": "one/accuracy"}},
        parallel={"zero": 2},
        resources={"ranks_per_node": 2, "cpus_per_rank": 1},
    )
    random = np.random.default_rng(2)
    for name, count, classes in (("held", 21, 3), ("one", 9, 1)):
        samples = {"x": random.normal(size=(count, 5)).astype(np.float32), "labels": random.integers(0, classes, count)}
        write_batches(tiny.folder / f"{name}.arrow", samples)
    done = tiny.command("run", "run.yaml")
    assert done.code == 0, done.said
    return tiny


def test_a_nan_of_another_metric_does_not_matter_to_what_compares_results(run: Tiny) -> None:
    assert {each["one/auroc"] for each in of_kind(run.run_dir, "evaluation")} == {None}
    assert [each["step"] for each in of_kind(run.run_dir, "lr_reduced")] == [6, 10]
    assert [each["step"] for each in of_kind(run.run_dir, "early_stop")] == [10]
    assert (run.run_dir / "export/model.best.onnx").is_file()


def test_weights_of_a_run_with_an_average_are_averaged_everywhere(run: Tiny) -> None:
    event = of_kind(run.run_dir, "evaluation")[-1]
    done = command_here("evaluate", "tiny", "--data", "held.arrow", "--json", folder=run.folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loss"] == pytest.approx(event["loss"], rel=1e-6)
    assert [found[name] for name in METRICS[:3]] == pytest.approx([event[name] for name in METRICS[:3]])
    assert found["confusion_matrix"] == event["confusion_matrix"]
    text = command_here("evaluate", "tiny", "--data", "held.arrow", folder=run.folder).stdout
    assert "at step 10, averaged weights" in text
    assert "confusion_matrix" in text

    done = command_here("export", "tiny", "--to", "safetensors", folder=run.folder)
    assert "step 10, 7 tensors, averaged weights" in done.stdout, done.stderr
    weights = load_file(run.run_dir / "export/model.safetensors")
    model = onnx.load(run.run_dir / "export/model.onnx")
    values = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
    started = open_weights(run.run_dir, None)
    for name in ("w", "u"):
        np.testing.assert_array_equal(values[name], weights[name])
        np.testing.assert_array_equal(started.tensors[name].read(), weights[name])


def test_an_average_that_never_begins_is_reported(tmp_path: Path) -> None:
    late = {"steps": 2, "optimizer": {"name": "sgd", "lr": 1e-2}, "average": {"name": "swa", "start": "9 epochs"}}
    done = Tiny.make(tmp_path, train=late).command("run", "run.yaml")
    assert done.code == 0, done.said
    assert "no weights were averaged" in done.said


def test_what_may_be_compared() -> None:
    nan = float("nan")
    results = {"loss": 1.0, "f1": 0.5, "auroc": nan, "a/loss": nan, "a/f1": 0.5, "b/loss.huber": nan, "b/f1": 0.5}
    assert [name for name in results if is_comparable(results, name)] == ["loss", "f1"]
