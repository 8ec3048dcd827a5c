"""`train.sync_batch_norm` on exported networks: two ranks follow PyTorch's one process with the whole batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import onnx
from case import BATCH
from kernels import needs_kernels
from onnx import numpy_helper
from project import Project, command, curve, logs
from reference import STEPS
from workshop import CASES, Workshop

from ortflow.workflow.data.write import record_batch, write_set

pytestmark = needs_kernels
RANKS = 2


def run(project: Project, name: str, case: str, **changes: Any) -> Path:
    settings: dict[str, Any] = {
        "model": {"path": "case.onnx", "loss": CASES[case].loss.model_dump(mode="json")},
        "data": {"train": {"path": "images/train.arrow"}, "micro_batch": BATCH // RANKS, "shuffle": False},
        "train": {
            "steps": STEPS,
            "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05},
        },
        "resources": {"ranks_per_node": RANKS, "cpus_per_rank": 1},
    }
    file = project.write(name, **{**settings, **changes})
    done = command("run", file.name, folder=project.folder, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(project.run_dir(name))}"
    return project.run_dir(name)


@pytest.mark.parametrize("case", ["resnet", "batchnorm"])
def test_two_ranks_follow_pytorch(case: str, workshop: Workshop, tmp_path: Path) -> None:
    project, expected = Project(tmp_path), workshop.curve(case)
    shutil.copy(workshop.model(case, "for_training", 18), tmp_path / "case.onnx")
    batches = list(CASES[case].batches(STEPS))
    (tmp_path / "images").mkdir()
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    write_set(tmp_path / "images" / "train.arrow", [record_batch(columns)])

    found = run(project, "synced", case, train__sync_batch_norm=True)
    own = run(project, "own", case)

    losses = np.array(curve(found))[:, 1]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5, atol=1e-5)
    assert np.abs(np.array(curve(own))[:, 1] - expected.losses).max() > 1e-3, "each rank's own statistics differ"
    model = onnx.load(found / "export" / "model.onnx")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    compared = [name for name in expected.statistics if name in tensors]
    assert compared
    for name in compared:
        # PyTorch's statistics are those of the same 20 batches.
        np.testing.assert_allclose(tensors[name], expected.statistics[name].numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
