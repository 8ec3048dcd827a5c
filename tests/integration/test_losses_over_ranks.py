"""A sum of losses, and metrics, are the same numbers on one rank and in every layout; padded rows count nowhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from data_sets import write_batches
from onnx import TensorProto, helper, numpy_helper
from tiny_runs import RUN, Tiny

SAMPLES = 46
METRICS: list[Any] = [
    {"name": "f1", "output": "y"}, {"name": "confusion_matrix", "output": "y"}, {"name": "r2", "label": "truth"},
]  # fmt: skip
SCORES: list[Any] = [{"name": "auroc", "output": "y"}, {"name": "average_precision", "output": "y"}]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two-ranks": (2, {}),
    "zero-3": (2, {"zero": 3}),
    "horizontal": (2, {"horizontal": 2}),
    "pipeline": (2, {"pipeline": 2, "cuts": [["r"]]}),
}


def save_two_heads(path: Path, seed: int = 0) -> None:
    """Five numbers to logits `y` [batch, 3] and values `z` [batch, 2]."""
    random = np.random.default_rng(seed)
    tensors = {"w": random.normal(size=(5, 8)), "u": random.normal(size=(8, 3)), "v": random.normal(size=(8, 2))}
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/in"),
        helper.make_node("Relu", ["h"], ["r"], name="/relu"),
        helper.make_node("MatMul", ["r", "u"], ["y"], name="/classes"),
        helper.make_node("MatMul", ["r", "v"], ["z"], name="/values"),
    ]
    x, y, z = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in {"x": 5, "y": 3, "z": 2}.items()
    )
    initializers = [numpy_helper.from_array(array.astype("float32"), name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "model", [x], [y, z], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)


def outcome(folder: Path, ranks: int, parallel: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """The losses of all steps of two micro-batches, and the evaluation at the end."""
    terms = [
        {"loss": {"kind": "focal", "output": "y", "ignore_index": None, "class_weights": [1.0, 2.0, 0.5]}},
        {"weight": 0.3, "loss": {"kind": "huber", "output": "z", "label": "truth"}},
        {"weight": 0.2, "loss": {"kind": "kl_div", "output": "y", "label": "shares", "temperature": 2.0}},
        {"weight": 0.1, "loss": {"kind": "kl_div", "output": "y", "teacher": "teacher.onnx"}},
    ]
    metrics = METRICS + (SCORES if parallel.get("pipeline") is None else [])
    replicas = 1 if parallel.keys() & {"pipeline", "horizontal"} else ranks
    tiny = Tiny.make(
        folder,
        model={"path": "model.onnx", "loss": {"kind": "sum", "terms": terms}, "metrics": metrics},
        data={"train": "set.arrow", "eval": "set.arrow", "micro_batch": 2, "eval_micro_batch": 5, "last_batch": "pad"},
        train={
            "steps": 8,
            "gradient_accumulation": 2 // replicas,
            "optimizer": {"name": "sgd", "lr": 0.05},
        },
        resources={"ranks_per_node": ranks, "cpus_per_rank": 1},
        parallel=parallel,
    )
    save_two_heads(folder / "model.onnx")
    save_two_heads(folder / "teacher.onnx", seed=7)
    random = np.random.default_rng(1)
    columns = {"x": (SAMPLES, 5), "truth": (SAMPLES, 2)}
    samples: dict[str, Any] = {name: random.normal(size=size).astype("float32") for name, size in columns.items()}
    shutil.rmtree(folder / "set.arrow", ignore_errors=True)
    (folder / "set.arrow").unlink(missing_ok=True)
    shares = random.dirichlet([1, 1, 1], SAMPLES).astype("float32")
    write_batches(folder / "set.arrow", {**samples, "labels": random.integers(0, 3, SAMPLES), "shares": shares})
    done = tiny.command("run", "run.yaml", timeout=200)
    assert done.code == 0, done.said
    events = [json.loads(line) for line in (tiny.run_dir / "events/rank-0000.jsonl").read_text().splitlines()]
    (evaluation,) = (event for event in events if event["event"] == "evaluation")
    return [event["loss"] for event in events if event["event"] == "step"], evaluation


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    return outcome(tmp_path_factory.mktemp("one"), 1, {})


@pytest.mark.rotates
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_numbers_of_one_rank(
    layout: str, alone: tuple[list[float], dict[str, Any]], tmp_path: Path
) -> None:
    losses, evaluation = alone
    assert evaluation["samples"] == SAMPLES
    assert np.sum(evaluation["confusion_matrix.y"]) == SAMPLES
    weights = {"loss.focal": 1.0, "loss.huber": 0.3, "loss.kl_div.2": 0.2, "loss.kl_div.3": 0.1}
    total = sum(weight * evaluation[name] for name, weight in weights.items())
    assert evaluation["loss"] == pytest.approx(total, rel=1e-12)
    names = ["loss", *weights, "f1.y", "r2.truth", "auroc.y", "average_precision.y"]
    ranks, parallel = LAYOUTS[layout]
    own, found = outcome(tmp_path, ranks, parallel)
    assert own == pytest.approx(losses, rel=2e-5)
    expected = {name: evaluation[name] for name in names if name in found}
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=2e-5)
    assert len(expected) == len(names) - 2 * ("pipeline" in parallel)
    assert found["confusion_matrix.y"] == evaluation["confusion_matrix.y"]


def test_refused_by_validate(tmp_path: Path) -> None:
    """Each fault is one sentence with its key, and nothing is left behind."""
    term = {"loss": {"kind": "cross_entropy", "output": "y"}}
    model = {"path": "model.onnx", "loss": {"kind": "sum", "terms": [term]}}
    tiny = Tiny.make(tmp_path, model=model, train={**RUN["train"], "gradient_accumulation": 2})
    save_two_heads(tmp_path / "model.onnx")
    done = tiny.command("validate", "run.yaml")
    assert done.code == 2
    assert "model.loss.terms[0].loss: " in done.said
    assert "a step has 2 micro-batches" in done.said
    assert "ignore_index to null" in done.said

    model = {**RUN["model"], "metrics": [{"name": "mae"}, "f1", "f1"]}
    early = {"metric": "f2"}
    train = {**RUN["train"], "early_stop": early, "evaluation": {"every_steps": 2}}
    run = {**RUN, "model": model, "train": train, "data": {**RUN["data"], "eval": "set.arrow"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    done = tiny.command("validate", "run.yaml")
    assert done.code == 2
    assert "model.metrics[0]: is mae, which compares values" in done.said
    assert "model.metrics[2]: lists f1 twice" in done.said
    assert "train.early_stop.metric: is f2, which evaluation does not compute" in done.said
    assert not tiny.run_dir.exists()
