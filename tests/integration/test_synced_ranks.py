"""`train.sync_batch_norm`: ranks train as one rank with the same global batch does, running statistics included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graph_build_models import save_model, value
from onnx import helper, numpy_helper
from project import Project, command, curve, logs

from ortflow.workflow.data.write import record_batch, write_set

pytestmark = pytest.mark.rotates

CHANNELS, SIDE, CLASSES, SAMPLES = 6, 8, 5, 96


def network(path: Path) -> None:
    """Convolutions with BatchNormalization, with a residual block, and one behind a product."""
    random = np.random.default_rng(0)
    tensors: dict[str, npt.NDArray[Any]] = {
        "first": (0.4 * random.normal(size=(CHANNELS, 3, 3, 3))).astype("float32"),
        "second": (0.3 * random.normal(size=(CHANNELS, CHANNELS, 3, 3))).astype("float32"),
        "last": (0.5 * random.normal(size=(CHANNELS, CLASSES))).astype("float32"),
    }
    nodes = []

    def norm(name: str, given: str, channels: int) -> str:
        for part, start in (("scale", 1.0), ("bias", 0.1), ("mean", 0.0), ("var", 1.0)):
            tensors[f"{name}.{part}"] = np.full(channels, start, "float32")
        inputs = [given, *(f"{name}.{part}" for part in ("scale", "bias", "mean", "var"))]
        nodes.append(helper.make_node("BatchNormalization", inputs, [f"{name}.out"], name, momentum=0.8))
        return f"{name}.out"

    nodes.append(helper.make_node("Conv", ["x", "first"], ["a"], "a", pads=[1] * 4))
    nodes.append(helper.make_node("Relu", [norm("norm.0", "a", CHANNELS)], ["b"], "b"))
    nodes.append(helper.make_node("Conv", ["b", "second"], ["c"], "c", pads=[1] * 4))
    nodes.append(helper.make_node("Add", [norm("norm.1", "c", CHANNELS), "b"], ["d"], "d"))
    nodes.append(helper.make_node("GlobalAveragePool", ["d"], ["e"], "e"))
    nodes.append(helper.make_node("Flatten", ["e"], ["f"], "f"))
    nodes.append(helper.make_node("MatMul", ["f", "last"], ["g"], "g"))
    nodes.append(helper.make_node("Identity", [norm("norm.2", "g", CLASSES)], ["logits"], "h"))
    save_model(path, nodes, [value("x", ["batch", 3, SIDE, SIDE])], [value("logits", ["batch", CLASSES])], tensors)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("synced")
    network(folder / "images.onnx")
    random = np.random.default_rng(1)
    labels = random.integers(0, CLASSES, SAMPLES)
    # Samples differ much, so that the statistics of half a batch are far from those of the whole.
    images = (
        random.normal(size=(SAMPLES, 3, SIDE, SIDE)) * random.uniform(0.2, 3, (SAMPLES, 1, 1, 1))
        + labels[:, None, None, None]
    )
    (folder / "images").mkdir()
    write_set(folder / "images" / "train.arrow", [record_batch({"x": images.astype("float32"), "labels": labels})])
    return Project(folder)


def run(project: Project, name: str, ranks: int, **changes: Any) -> Path:
    path = "images/train.arrow"
    settings: dict[str, Any] = {
        "model": {"path": "images.onnx", "loss": "cross_entropy"},
        "data": {"train": {"path": path}, "eval": {"path": path}, "micro_batch": 8 // ranks},
        "train__steps": 20, "train__schedule": {"name": "constant"}, "train__evaluation": {"every_steps": 10},
        "train__optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9}, "resources__ranks_per_node": ranks,
        "resources__cpus_per_rank": 1, "checkpoint__every_steps": 10,
    }  # fmt: skip
    file = project.write(name, **{**settings, **changes})
    done = command("run", file.name, folder=project.folder, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(project.run_dir(name))}"
    return project.run_dir(name)


@pytest.fixture(scope="module")
def one_rank(project: Project) -> Path:
    return run(project, "one-rank", 1)


def exported(run_dir: Path) -> dict[str, npt.NDArray[Any]]:
    model = onnx.load(run_dir / "export" / "model.onnx")
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two": (2, {}),
    "four": (4, {}),
    "zero-1": (2, {"parallel": {"zero": 1}}),
    "zero-2": (2, {"parallel": {"zero": 2}}),
    "zero-3": (2, {"parallel": {"zero": 3}}),
    "recompute": (2, {"model__recompute": [["b"], ["d"]]}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_train_as_one(name: str, project: Project, one_rank: Path) -> None:
    ranks, changes = LAYOUTS[name]
    found = run(project, name, ranks, train__sync_batch_norm=True, **changes)
    np.testing.assert_allclose(np.array(curve(found)), np.array(curve(one_rank)), rtol=1e-5, atol=1e-6)
    here, there = exported(found), exported(one_rank)
    assert any(tensor.endswith(".var") for tensor in there)
    for tensor, expected in there.items():
        np.testing.assert_allclose(here[tensor], expected, rtol=1e-5, atol=1e-5, err_msg=tensor)


def test_without_it_each_rank_has_its_own(project: Project, one_rank: Path) -> None:
    found = run(project, "own", 2)
    assert np.abs(np.array(curve(found)) - np.array(curve(one_rank))).max() > 1e-3
