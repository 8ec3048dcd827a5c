"""Each metric against its definition in double precision, over padded batches whose totals are added as over ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array, run_graph, save_model, value
from loss_graphs import feeds_of, forward
from onnx import helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.objective.evaluation import complete
from ortflow.workflow.spec.model import ModelSection
from ortflow.workflow.trainer.evaluation import evaluated, gathered_metrics, joined

RNG = np.random.default_rng(3)
SAMPLES, BATCH = 23, 8


def evaluate(
    section: dict[str, Any], outputs: dict[str, Array], labels: dict[str, Array]
) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
    """The results over batches of 8 rows, the last one padded, as the trainer adds them."""
    model = ModelSection.model_validate({"path": "-", **section})
    graph = forward({name: array.shape[1:] for name, array in outputs.items()}, BATCH)
    complete(graph.graph, model.loss, model.metrics, f"{next(iter(outputs))}.x", True)
    totals: dict[str, Array] = {}
    pieces: list[dict[str, list[Array]]] = [{}, {}]
    for number, start in enumerate(range(0, SAMPLES, BATCH)):
        rows = np.arange(start, start + BATCH) % SAMPLES
        batch = {name: array[rows] for name, array in outputs.items()}
        feeds = feeds_of(batch, {name: array[rows] for name, array in labels.items()}, min(BATCH, SAMPLES - start))
        for name, array in run_graph(graph, feeds).items():
            if name.endswith(("_scores", "_truths")):
                pieces[number % 2].setdefault(name, []).append(array)
            elif name.startswith("ortflow."):
                totals[name] = totals.get(name, 0) + array.astype("float64").reshape(-1)
    return evaluated(totals, joined(pieces, gathered_metrics(model)), model)


def f1(truth: Array, guess: Array) -> tuple[float, float, float]:
    both, predicted, actual = (truth & guess).sum(), guess.sum(), truth.sum()
    return both / max(predicted, 1), both / max(actual, 1), 2 * both / max(predicted + actual, 1)


def pairs(scores: Array, truth: Array) -> float:
    """The share of pairs of a positive and a negative in order; equal ones count half."""
    difference = scores[truth][:, None] - scores[~truth][None]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def precision_by_definition(scores: Array, truth: Array) -> float:
    """The sum over the thresholds of precision times the increase of recall."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        recall = (truth & chosen).sum() / truth.sum()
        total += (recall - before) * (truth & chosen).sum() / chosen.sum()
        before = recall
    return float(total)


@pytest.mark.parametrize("positions", [(), (3,)])
def test_of_classes(positions: tuple[int, ...]) -> None:
    logits = RNG.normal(size=(SAMPLES, *positions, 5)).astype("float32")
    labels = RNG.integers(0, 4, (SAMPLES, *positions))  # class 4 has no label
    labels.reshape(-1)[::6] = -100
    names = ["precision", "recall", "f1", "iou", "confusion_matrix", "auroc", "average_precision", "accuracy"]
    metrics = [*names, {"name": "top_k", "k": 2}, {"name": "f1", "average": "micro"}, "perplexity"]
    section = {"loss": {"kind": "cross_entropy"}, "metrics": metrics}
    found, tables = evaluate(section, {"y": logits}, {"labels": labels})

    x, y = logits.reshape(-1, 5).astype("float64"), labels.reshape(-1)
    x, y = x[y >= 0], y[y >= 0]
    guess = x.argmax(1)
    used = [place for place in range(5) if (y == place).any() or (guess == place).any()]
    each = np.array([f1(y == place, guess == place) for place in used])
    matrix = np.zeros((5, 5), int)
    np.add.at(matrix, (y, guess), 1)
    assert tables == {"confusion_matrix": matrix.tolist()}
    expected = dict(zip(("precision", "recall", "f1"), each.mean(0), strict=True))
    expected["iou"] = np.mean([matrix[p, p] / (matrix[p].sum() + matrix[:, p].sum() - matrix[p, p]) for p in used])
    expected["accuracy"] = expected["f1_micro"] = (guess == y).mean()
    expected["top_2"] = (np.argsort(-x, 1)[:, :2] == y[:, None]).any(1).mean()
    logs = (x - np.log(np.exp(x).sum(1, keepdims=True))).astype("float32")
    expected["auroc"] = np.mean([pairs(logs[:, place], y == place) for place in range(4)])
    expected["average_precision"] = np.mean([precision_by_definition(logs[:, p], y == p) for p in range(4)])
    expected["loss"] = -logs[np.arange(len(y)), y].mean()
    expected["perplexity"] = math.exp(expected["loss"])
    assert found == pytest.approx(expected, rel=1e-5)
    assert next(iter(found)) == "loss"


@pytest.mark.parametrize("columns", [1, 3])
def test_of_targets(columns: int) -> None:
    logits = (np.round(RNG.normal(size=(SAMPLES, columns)) * 3) / 2).astype("float32")  # some are equal
    target = RNG.integers(0, 2, (SAMPLES, columns)).astype("float32")
    metrics = ["precision", "recall", "f1", {"name": "f1", "average": "macro"}, "confusion_matrix", "auroc"]
    metrics += ["average_precision", "accuracy", "iou"]
    section = {"loss": {"kind": "binary_focal", "label": "truth"}, "metrics": metrics}
    found, tables = evaluate(section, {"y": logits}, {"truth": target})
    guess, truth = logits > 0, target > 0.5
    expected = dict(zip(("precision", "recall", "f1"), f1(truth, guess), strict=True))
    expected["f1_macro"] = np.mean([f1(truth[:, place], guess[:, place])[2] for place in range(columns)])
    expected["auroc"] = np.mean([pairs(logits[:, place], truth[:, place]) for place in range(columns)])
    each = [precision_by_definition(logits[:, place], truth[:, place]) for place in range(columns)]
    expected["average_precision"] = np.mean(each)
    expected["accuracy"] = (guess == truth).mean()
    expected["iou"] = (guess & truth).sum() / (guess | truth).sum()
    loss = found.pop("loss")
    assert math.isfinite(loss)
    assert found == pytest.approx(expected, rel=1e-6)
    wrong = (~guess & truth).sum()
    assert tables["confusion_matrix"] == [
        [(~guess & ~truth).sum(), (guess & ~truth).sum()],
        [wrong, (guess & truth).sum()],
    ]


def test_of_values() -> None:
    """Labels far from 0, where fp32 sums of their squares would leave no digit of r2."""
    y = (1e4 + RNG.normal(size=(SAMPLES, 2))).astype("float32")
    x = (y + 0.1 * RNG.normal(size=y.shape)).astype("float32")
    section = {"loss": {"kind": "huber"}, "metrics": ["mae", "mse", "rmse", "mape", "r2"]}
    found, _ = evaluate(section, {"y": x}, {"labels": y})
    x, y = x.astype("float64"), y.astype("float64")
    error = x - y
    expected = {"mae": np.abs(error).mean(), "mse": (error**2).mean(), "mape": np.abs(error / y).mean()}
    expected["rmse"] = math.sqrt(expected["mse"])
    expected["r2"] = 1 - (error**2).sum() / ((y - y.mean()) ** 2).sum()
    del found["loss"]
    assert found == pytest.approx(expected, rel=1e-5)


def test_metrics_of_other_outputs_beside_a_sum(tmp_path: Path) -> None:
    """Each term and the sum are means over the set, although the labels that count differ between batches."""
    logits = RNG.normal(size=(SAMPLES, 4)).astype("float32")
    boxes = RNG.normal(size=(SAMPLES, 2)).astype("float32")
    labels, truth = RNG.integers(0, 4, SAMPLES), RNG.normal(size=(SAMPLES, 2)).astype("float32")
    labels[:7] = -100
    nodes = [
        helper.make_node("Sub", ["boxes", "truth"], ["d"]),
        helper.make_node("Abs", ["d"], ["a"]),
        helper.make_node("Shape", ["a"], ["s"]),
        helper.make_node("Range", ["zero", "valid", "one"], ["r"]),
        helper.make_node("Gather", ["a", "r"], ["kept"], axis=0),
        helper.make_node("ReduceMax", ["kept"], ["each"], axes=[1], keepdims=0),
        helper.make_node("ReduceSum", ["each"], ["sum"], keepdims=0),
        helper.make_node("Size", ["each"], ["n"]),
        helper.make_node("Cast", ["n"], ["weight"], to=1),
        helper.make_node("Squeeze", ["ortflow.valid"], ["valid"]),
    ]
    nodes.insert(3, nodes.pop())
    inputs = [value("boxes", ["n", 2]), value("truth", ["n", 2]), value("ortflow.valid", [1], "int64")]
    constants = {"zero": np.array(0), "one": np.array(1)}
    path = save_model(
        tmp_path / "worst.onnx", nodes, inputs, [value("sum", []), value("weight", [])], constants, opset=17
    )
    section = {
        "loss": {
            "kind": "sum",
            "terms": [
                {"weight": 2.0, "loss": {"kind": "cross_entropy", "output": "logits"}},
                {"weight": 0.5, "loss": {"kind": "mse", "output": "boxes", "label": "truth"}},
            ],
        },
        "metrics": [
            {"name": "accuracy", "output": "logits"},
            {"name": "mae", "label": "truth"},
            {"name": "graph", "path": str(path), "better": "higher"},
        ],
    }
    found, _ = evaluate(section, {"logits": logits, "boxes": boxes}, {"labels": labels, "truth": truth})
    kept = labels >= 0
    x = logits[kept].astype("float64")
    entropy = (np.log(np.exp(x).sum(1)) - x[np.arange(len(x)), labels[kept]]).mean()
    mse = ((boxes.astype("float64") - truth) ** 2).mean()
    expected = {
        "loss": 2 * entropy + 0.5 * mse,
        "loss.cross_entropy": entropy,
        "loss.mse": mse,
        "accuracy.logits": (x.argmax(1) == labels[kept]).mean(),
        "mae.truth": np.abs(boxes - truth).mean(),
        "worst": np.abs(boxes - truth).max(1).mean(),
    }
    assert found == pytest.approx(expected, rel=1e-5)


def test_nothing_to_count_is_nan() -> None:
    section = {"loss": {"kind": "cross_entropy"}, "metrics": ["f1", "auroc", "accuracy"]}
    logits = RNG.normal(size=(SAMPLES, 3)).astype("float32")
    found, _ = evaluate(section, {"y": logits}, {"labels": np.full(SAMPLES, -100)})
    assert all(map(math.isnan, found.values()))
    one_kind = {"loss": {"kind": "bce_with_logits"}, "metrics": ["auroc"]}
    found, _ = evaluate(one_kind, {"y": logits}, {"labels": np.ones((SAMPLES, 3), "float32")})
    assert math.isnan(found["auroc"])


@pytest.mark.parametrize(
    ("metric", "where", "words"),
    [
        ({"name": "top_k", "k": 9}, "model.metrics[0].k", "there are 4 classes"),
        ({"name": "f1", "average": "binary"}, "model.metrics[0].average", "there are 4 classes"),
        ({"name": "mae"}, "model.metrics[0]", "compares values, and label 'labels' is of numbers of classes"),
        ({"name": "mae", "output": "y"}, "model.metrics[0]", "compares values"),
        ({"name": "mae", "output": "z", "label": "w"}, "model.metrics[0].output", "has no output 'z'"),
        ({"name": "graph", "path": "none.onnx"}, "model.metrics[0].path", "none.onnx"),
    ],
)  # fmt: skip
def test_refused(metric: dict[str, Any], where: str, words: str) -> None:
    section = {"loss": {"kind": "cross_entropy", "output": "y"}, "metrics": [metric]}
    logits = RNG.normal(size=(SAMPLES, 4)).astype("float32")
    with pytest.raises(UserError) as refused:
        evaluate(section, {"y": logits}, {"labels": np.zeros(SAMPLES, "int64"), "w": logits})
    assert refused.value.where == where
    assert words in refused.value.what


def test_checked_by_onnx() -> None:
    graph = forward({"y": (4,)}, BATCH)
    model = ModelSection.model_validate(
        {"path": "-", "loss": {"kind": "cross_entropy"}, "metrics": ["f1", "auroc", "confusion_matrix"]}
    )
    complete(graph.graph, model.loss, model.metrics, "y.x", True)
    onnx.checker.check_model(graph)
