"""`checkpoint.best`: the best checkpoint outlives `keep`, a kill and a resume, is exported, and `status` names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from data_sets import write_batches
from onnx import numpy_helper
from tiny_runs import RUN, STEPS, Tiny

from ortflow.workflow.run.progress import Progress
from ortflow.workflow.run.strike import FOLDER_VARIABLE, Plan
from ortflow.workflow.spec.checkpoint import Best
from ortflow.workflow.steps.best import improves

SETS = {"same": {"path": "other.arrow"}, "seen": {"path": "set.arrow"}}
BEST: dict[str, Any] = {
    "model": {**RUN["model"], "metrics": ["f1"]},
    "data": {
        **RUN["data"],
        "eval": "other.arrow",
        "eval_sets": {"same": {"path": "other.arrow"}, "seen": {"path": "set.arrow"}},
    },
    "train": {"steps": STEPS, "optimizer": {"name": "sgd", "lr": 0.8}, "evaluation": {"every_steps": 1}},
    "checkpoint": {"every_steps": 100, "keep": {"newest": 1}, "best": {"metric": "same/f1"}},
}


def make(folder: Path) -> Tiny:
    tiny = Tiny.make(folder, **BEST)
    random = np.random.default_rng(5)
    samples = {"x": random.normal(size=(40, 5)).astype(np.float32), "labels": random.integers(0, 3, 40)}
    write_batches(folder / "other.arrow", samples)
    return tiny


def events(tiny: Tiny, kind: str) -> list[dict[str, Any]]:
    lines = (tiny.run_dir / "events/rank-0000.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def weights(path: Path) -> dict[str, bytes]:
    return {tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in onnx.load(path).graph.initializer}


def test_kept_exported_named_and_resumed(tmp_path: Path) -> None:
    tiny = make(tmp_path / "whole")
    done = tiny.command("run", "run.yaml", timeout=120)
    assert done.code == 0, done.said
    evaluations = events(tiny, "evaluation")
    assert all(event[f"same/{name}"] == event[name] for event in evaluations for name in ("loss", "f1"))
    assert all(event["seen/loss"] != event["loss"] for event in evaluations)
    assert all(event["samples"] == 40 for event in evaluations)
    values = {event["step"]: event["f1"] for event in evaluations}
    best = max(values, key=lambda step: (values[step], -step))
    assert best != STEPS, "choose data of which the best is not the last"
    checkpoints = sorted(path.name for path in (tiny.run_dir / "checkpoints").glob("step-*"))
    assert checkpoints == [f"step-{best:08}", f"step-{STEPS:08}"]
    how = json.loads(tiny.command("status", "tiny", "--json").out)
    path = tiny.run_dir / "export/model.best.onnx"
    assert how["best_checkpoint"] == {"metric": "same/f1", "value": values[best], "step": best, "path": str(path)}
    assert f"step {best}, same/f1 {values[best]:.4f}, exported {path}" in tiny.command("status", "tiny").out
    assert tiny.command("checkpoint", "prune", "tiny", "--newest", "1").out == ""
    assert tiny.command("export", "tiny", "--step", str(best), "--output", "again.onnx").code == 0
    assert weights(path) == weights(tiny.folder / "again.onnx") != weights(tiny.run_dir / "export/model.onnx")

    killed = make(tmp_path / "killed")
    strike = tmp_path / "strike"
    strike.mkdir()
    Plan(steps=10 * STEPS, signal="SIGKILL", step=best + 1).write(strike)
    done = killed.command("run", "run.yaml", timeout=120, **{FOLDER_VARIABLE: str(strike)})
    assert done.code == 0, done.said
    assert len(events(killed, "attempt_start")) == 2
    assert weights(killed.run_dir / "export/model.best.onnx") == weights(path)
    assert [event["step"] for event in events(killed, "export_best")] == [best]


def with_sets(sets: dict[str, Any]) -> dict[str, Any]:
    return {"data": {**BEST["data"], "eval_sets": sets}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": RUN["data"]}, "checkpoint.best: needs an evaluation set"),
        ({"train": RUN["train"]}, "checkpoint.best: needs periodic evaluation"),
        ({"checkpoint": {"best": {"metric": "auroc"}}}, "checkpoint.best.metric: is auroc, which evaluation does not"),
        (
            {"checkpoint": {"best": {"metric": "no/f1"}}},
            "checkpoint.best.metric: is no/f1, and there is no evaluation set 'no'",
        ),
        (
            {"data": {**BEST["data"], "eval_sets": {"a": {"path": "no.arrow"}}}, "checkpoint": {}},
            "data.eval_sets.a.path: there is no file",
        ),
        (with_sets({"a": {}}), "data.eval_sets.a.path: is missing"),
        (with_sets({"a/b": {"path": "x"}}), "data.eval_sets.a/b"),
    ],
)
def test_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    tiny = make(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, **BEST, **change}))
    done = tiny.command("validate", "run.yaml")
    assert done.code == 2
    assert words in done.said
    assert not tiny.run_dir.exists()


def test_which_is_better() -> None:
    progress, rule = Progress(), Best(metric="f1")
    found = []
    for step, value in enumerate((0.5, 0.4, float("nan"), 0.5, 0.6), start=1):
        progress.step = step
        found.append(improves(rule, progress, {"loss": 1.0, "f1": value}, "f1 on set", ()))
    assert found == [True, False, False, False, True]
    assert (progress.best_checkpoint, progress.best_checkpoint_step) == (0.6, 5)
    assert Progress.from_json(progress.to_json()) == progress
    assert not improves(rule, progress, {"loss": float("nan"), "f1": 0.9}, "f1 on set", ())
    assert improves(rule, progress, {"loss": 1.0, "f1": 0.1}, "f1 on another set", ())
    rule = Best()
    assert improves(rule, progress, {"loss": 1.0}, "loss on set", ())
    assert not improves(rule, progress, {"loss": 1.1}, "loss on set", ())
    assert improves(rule, progress, {"loss": 0.9}, "loss on set", ())
