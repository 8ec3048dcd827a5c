"""Every class of wrong input through `ortflow run`: one sentence, exit 2, no traceback, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from graph_build_models import linear
from in_process import command_here
from onnx import TensorProto, helper, numpy_helper
from project import Project, command, of_kind
from small_network import save_model


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    made = Project.make(tmp_path_factory.mktemp("bad"))
    folder = made.folder
    (folder / "text.onnx").write_text("not a model")
    convert(folder, "beyond", tokens=np.full((64, 33), 999, np.int16))
    convert(folder, "floats", tokens=np.zeros((64, 33), np.float32))
    convert(folder, "matrix", tokens=np.zeros((64, 4, 33), np.uint8))
    whole = (folder / "set" / "train.arrow").read_bytes()
    (folder / "cut.arrow").write_bytes(whole[: len(whole) // 2])
    onnx.save(merged(onnx.load(folder / "model.onnx")), folder / "merged.onnx")
    onnx.save(without_gradient(), folder / "undifferentiable.onnx")
    return made


def convert(folder: Path, name: str, **arrays: np.ndarray) -> None:  # type: ignore[type-arg]
    np.savez(folder / f"{name}.npz", **arrays)
    done = command_here("data", "convert", f"{name}.npz", "--output", f"{name}.arrow", folder=folder)
    assert done.returncode == 0, done.stderr


def merged(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as PyTorch's default export writes it: one initializer for all equal ones."""
    first: dict[bytes, str] = {}
    names = {}
    for tensor in model.graph.initializer:
        name = tensor.name
        tensor.name = ""
        names[name] = first.setdefault(tensor.SerializeToString(), name)
        tensor.name = name
    kept = [tensor for tensor in model.graph.initializer if names[tensor.name] == tensor.name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    return model


def without_gradient() -> onnx.ModelProto:
    """Logits through Unique, which has neither a gradient nor a definition by other operators."""
    weight = numpy_helper.from_array(np.ones((256, 4), np.float32), "table.weight")
    nodes = [
        helper.make_node("Gather", ["table.weight", "tokens"], ["embedded"], name="embed"),
        helper.make_node("Unique", ["embedded"], ["values"], name="distinct_values"),
        helper.make_node("ReduceMax", ["values"], ["largest"], name="largest", keepdims=0),
        helper.make_node("Mul", ["embedded", "largest"], ["logits"], name="logits"),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", 4])],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "no model file": ({"model__path": "nowhere.onnx"}, ["model.path", "nowhere.onnx"]),
    "no ONNX file": ({"model__path": "text.onnx"}, ["text.onnx", "ONNX"]),
    "wrong key": ({"train__stepps": 3}, ["train.stepps", "did you mean steps"]),
    "wrong type": ({"train__steps": "many"}, ["train.steps", "many"]),
    "batch of 0": ({"data__micro_batch": 0}, ["data.micro_batch"]),
    "no label column": ({"data__train": {"path": "set/train.arrow", "columns": {"tokens": "tokens[1:]"}}}, ["labels"]),
    "wrong dtype": (
        {"data__train": {"path": "floats.arrow", "columns": {"tokens": "tokens[1:]", "labels": "tokens[1:]"}}},
        ["float32", "tokens"],
    ),
    "wrong shape": (
        {"data__train": {"path": "matrix.arrow", "columns": {"tokens": "tokens", "labels": "tokens"}}},
        ["tokens", "shape"],
    ),
    "longer than the model": (
        {"data__train": {"path": "set/train.arrow", "columns": {"tokens": "tokens", "labels": "tokens"}}},
        ["33"],
    ),
    "beyond the vocabulary": (
        {"data__train": {"path": "beyond.arrow", "columns": {"tokens": "tokens[1:]", "labels": "tokens[1:]"}}},
        ["999", "255"],
    ),
    "truncated shard": (
        {"data__train": {"path": "cut.arrow", "columns": {"tokens": "tokens[:-1]", "labels": "tokens[1:]"}}},
        ["cut.arrow"],
    ),
    "no gradient": ({"model__path": "undifferentiable.onnx"}, ["Unique", "distinct_values"]),
    "export for inference": (
        {"model__path": "merged.onnx"},
        ["merged.onnx", "is used in", "ortflow.export_for_training", "model.accept_inference_export: true"],
    ),
    "unknown optimizer": ({"train__optimizer": {"name": "adan", "lr": 0.1}}, ["train.optimizer.name", "adan"]),
    "degrees that do not multiply": ({"parallel__data": 3, "resources__ranks_per_node": 2}, ["parallel"]),
    "pipeline": (
        {"parallel__pipeline": 2, "parallel__zero": 2, "resources__ranks_per_node": 2},
        ["parallel.zero", "parallel.pipeline is 2"],
    ),
    "more stages than cuts": (
        {"parallel__pipeline": 2, "parallel__cuts": [], "resources__ranks_per_node": 2},
        ["parallel.cuts", "needs 1"],
    ),
    "too few samples": ({"data__micro_batch": 5000, "resources__ranks_per_node": 2}, ["samples", "global batch"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_exit_2_and_nothing_left_behind(project: Project, case: str) -> None:
    changes, expected = CASES[case]
    name = case.replace(" ", "-").lower()
    # More ranks say the same once more; those of degrees and stages are in the cases.
    file = project.write(name, **{"resources__ranks_per_node": 1, **changes})
    done = command("run", file.name, folder=project.folder)
    output = done.stderr
    assert done.returncode == 2, done.stdout + output
    for words in expected:
        assert words in output, output
    assert "Traceback" not in done.stdout + output
    assert not project.run_dir(name).exists(), sorted(project.run_dir(name).rglob("*"))


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs /proc")
def test_an_unwritable_directory(project: Project) -> None:
    """/proc refuses new folders to every user, including root."""
    file = project.write("unwritable", run_dir="/proc/self/run")
    done = command("run", file.name, folder=project.folder)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_accepted_export_for_inference_warns(project: Project) -> None:
    changes = {"model__path": "merged.onnx", "model__accept_inference_export": True, "train__steps": 6}
    file = project.write("accepted", **changes)
    done = command("run", file.name, folder=project.folder)
    assert done.returncode == 0, done.stderr
    reported = [record["message"] for record in of_kind(project.run_dir("accepted"), "warning")]
    assert any("the exporter merged parameters of equal value" in message for message in reported)
    assert all(f"warning: {message}" in done.stdout for message in reported)


@pytest.mark.parametrize("where", ["train", "eval"])
@pytest.mark.parametrize("command_name", ["run", "validate"])
def test_labels_out_of_range_are_refused_before_the_first_step(tmp_path: Path, where: str, command_name: str) -> None:
    """A binary cross-entropy of targets outside 0 to 1 has no minimum, nor has the Poisson loss of a count below 0; a
    label beyond the classes has no meaning."""
    save_model(tmp_path / "model.onnx")
    random = np.random.default_rng(1)
    x = random.normal(size=(64, 5)).astype("float32")
    fits = {"truths": random.random((64, 3)).astype("float32"), "classes": random.integers(0, 3, 64)}
    fits["counts"] = random.poisson(2.0, (64, 3)).astype("float32")
    convert(tmp_path, "good", x=x, **fits)
    beyond = {name: values.copy() for name, values in fits.items()}
    beyond["truths"][61, 1], beyond["classes"][61], beyond["counts"][61, 2] = 12.5, 7, -2.5
    convert(tmp_path, "bad", x=x, **beyond)
    other = {"train": "eval", "eval": "train"}[where]
    for loss, column, value in (
        ("bce_with_logits", "truths", "12.5"),
        ("cross_entropy", "classes", "7"),
        ("poisson", "counts", "-2.5"),
    ):
        sets = {
            each: {"path": f"{name}.arrow", "columns": {"labels": column}}
            for each, name in ((where, "bad"), (other, "good"))
        }
        content = {
            "name": column,
            "model": {"path": "model.onnx", "loss": {"kind": loss}},
            "data": {**sets, "micro_batch": 4},
            "train": {"steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
        }
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
        start = command if command_name == "run" else command_here
        done = start(command_name, "run.yaml", folder=tmp_path)
        output = done.stdout + done.stderr
        assert done.returncode == 2, output
        assert f"sample 61 of column '{column}' holds {value}" in output
        assert "vocabulary" not in output
        assert not (tmp_path / "runs" / column).exists()


@pytest.mark.parametrize(("label", "classes"), [(0, "classes 0 to 5 without the blank, 0"), (6, "classes 0 to 5")])
def test_a_sequence_has_no_blank_and_no_class_beyond_the_last(tmp_path: Path, label: int, classes: str) -> None:
    linear(tmp_path / "model.onnx", out=("batch", 4, 6), width=5)
    labels = np.full((64, 2), 3)
    labels[60, 1] = -1  # padding
    labels[61, 1] = label
    convert(tmp_path, "set", x=np.ones((64, 5), np.float32), labels=labels)
    content = {
        "name": "sequences",
        "model": {"path": "model.onnx", "loss": {"kind": "ctc", "batch_first": True}},
        "data": {"train": {"path": "set.arrow"}, "micro_batch": 4},
        "train": {"steps": 4, "optimizer": {"name": "sgd", "lr": 0.1}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    done = command_here("validate", "run.yaml", folder=tmp_path)
    output = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, output
    assert f"sample 61 of column 'labels' holds {label}" in output
    assert classes in output
