"""The stages of a pipeline as files of their own: joined, and trained as the model that they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper
from onnx.utils import Extractor
from project import FEW_CORES, Project, command, curve, evaluations, logs, of_kind

SHAPE: dict[str, Any] = {
    "train__steps": 12, "train__global_batch": 8, "data__micro_batch": 2, "resources__cpus_per_rank": 1,
    "train__schedule": {"name": "constant"}, "train__evaluation": {"every_steps": 6}, "checkpoint__every_steps": 6,
    "train__optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}, "train__clip_norm": 1.0,
}  # fmt: skip
BETWEEN = ["h.0.output", "h.1.output"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    return Project.make(tmp_path_factory.mktemp("joined"), dropout=0.0)


def stage_files(project: Project) -> list[str]:
    """Three files of the project's model, whose embedding is also its output layer.

    The second one names the tensors of its layer as the first one does, as parts of a program that export themselves.
    """
    whole = onnx.load(project.folder / "model.onnx")
    for name in BETWEEN:
        whole.graph.value_info.append(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "sequence", 32]),
        )
    files = []
    for number, (inputs, outputs) in enumerate(
        ((["tokens"], BETWEEN[:1]), ([BETWEEN[0], "tokens"], BETWEEN[1:]), (BETWEEN[1:], ["logits"]))
    ):
        model = Extractor(whole).extract_model(inputs, outputs)
        if number == 1:
            own = {name: name.replace("h.1.", "h.0.") for name in named(model) if name not in BETWEEN}
            for node in model.graph.node:
                node.input[:] = [own.get(name, name) for name in node.input]
                node.output[:] = [own.get(name, name) for name in node.output]
            for tensor in model.graph.initializer:
                tensor.name = own[tensor.name]
        files.append(f"stage{number}.onnx")
        onnx.save(model, project.folder / files[-1])
    return files


def named(model: onnx.ModelProto) -> set[str]:
    names = {tensor.name for tensor in model.graph.initializer}
    return names.union(*(node.output for node in model.graph.node))


def exported(run_dir: Path) -> dict[str, Any]:
    """Its weights, not its indices."""
    tensors = onnx.load(run_dir / "export" / "model.onnx").graph.initializer
    return {t.name: numpy_helper.to_array(t) for t in tensors if t.data_type == TensorProto.FLOAT}


def test_three_files_train_as_the_whole_model(project: Project) -> None:
    whole = project.run("whole", **SHAPE, resources__ranks_per_node=1)
    joined = command("join", *stage_files(project), "--output", "joined.onnx", folder=project.folder)
    assert joined.returncode == 0, joined.stderr
    assert any(line.endswith("in the stages 0 and 2: wte.weight") for line in joined.stdout.splitlines())
    assert "stage1.h.0.mlp.c_fc.weight" in joined.stdout, "another layer with the same names"
    keys = yaml.safe_load(joined.stdout)
    file = project.write("stages", **SHAPE, resources__ranks_per_node=3, parallel=keys["parallel"])
    done = command("run", file.name, f"model.path={keys['model']['path']}", folder=project.folder, **FEW_CORES)
    found = project.run_dir("stages")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(found)}"
    np.testing.assert_allclose(curve(found), curve(whole), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(evaluations(found), evaluations(whole), rtol=1e-5, atol=1e-6)
    here, there = exported(found), exported(whole)
    # Undo the names that the second file gave, and those that `join` made of them.
    names = {name: name.replace("stage1.h.0.", "h.1.") for name in here}
    assert set(names.values()) == there.keys()
    for name, same in names.items():
        np.testing.assert_allclose(here[name], there[same], rtol=1e-5, atol=1e-5, err_msg=name)
    parameters = [of_kind(found, "memory", rank)[0]["parameters"] for rank in range(3)]
    assert all(each < of_kind(whole, "memory")[0]["parameters"] for each in parameters), "each rank holds its stage"
