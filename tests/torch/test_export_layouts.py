"""Whole runs of exported transformers under layouts that divide them: the curve and the model of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import numpy.typing as npt
import onnx
import yaml
from data_sets import write_batches
from kernels import needs_kernels
from onnx import numpy_helper
from project import command, curve, logs

if TYPE_CHECKING:
    from workshop import Workshop

pytestmark = needs_kernels
STEPS = 20
GLOBAL_BATCH = 8
NAMES = ("gpt2", "bert", "llama", "t5")
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"pipeline": 2}), (2, {"horizontal": 2}), (3, {"pipeline": 3}), (4, {"pipeline": 2, "zero": 1}),
    (4, {"pipeline": 2, "horizontal": 2}), (4, {"horizontal": 2, "zero": 2}),
    (2, {"horizontal": 2, "sequence_parallel": True}), (4, {"pipeline": 2, "horizontal": 2, "sequence_parallel": True}),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_exports_train_under_every_layout(name: str, workshop: Workshop, tmp_path: Path) -> None:
    from workshop import CASES

    case = CASES[name]
    write_batches(tmp_path / "set.arrow", *case.batches(STEPS * GLOBAL_BATCH // 4))
    model = {
        "path": str(workshop.model(name, "for_training", 18)), "loss": case.loss.model_dump(mode="json"),
        "labels": list(case.labels),
    }  # fmt: skip
    alone = trained(tmp_path, model, 1, {})
    for ranks, parallel in LAYOUTS:
        found = trained(tmp_path, model, ranks, parallel)
        about = f"{name} {parallel}"
        np.testing.assert_allclose(np.array(curve(found)), np.array(curve(alone)), rtol=1e-5, atol=1e-5, err_msg=about)
        here, there = parameters(found), parameters(alone)
        assert here.keys() == there.keys()
        for tensor, values in there.items():
            np.testing.assert_allclose(here[tensor], values, rtol=1e-5, atol=1e-5, err_msg=f"{about} {tensor}")


def trained(folder: Path, model: dict[str, Any], ranks: int, parallel: dict[str, Any]) -> Path:
    """The run directory of a run of 20 steps; SGD, because Adam makes steps of the rounding in vanishing gradients."""
    run = {
        "name": "-".join(["ranks", str(ranks), *(f"{k[:10]}-{int(v)}" for k, v in parallel.items())]).replace("_", "-"),
        "model": model,
        "data": {"train": "set.arrow", "micro_batch": 2},
        "train": {
            "steps": STEPS, "global_batch": GLOBAL_BATCH, "clip_norm": 1.0,
            "optimizer": {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
        },
        "parallel": parallel,
        "resources": {"ranks_per_node": ranks, "cpus_per_rank": 1},
        "restart": {"failures": 0},
    }  # fmt: skip
    file = folder / f"{run['name']}.yaml"
    file.write_text(yaml.safe_dump(run))
    done = command("run", file.name, folder=folder, timeout=300)
    run_dir = folder / "runs" / str(run["name"])
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(run_dir)}"
    return run_dir


def parameters(run_dir: Path) -> dict[str, npt.NDArray[Any]]:
    exported = onnx.load(run_dir / "export" / "model.onnx")
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in exported.graph.initializer}
    return {name: values for name, values in found.items() if values.dtype == np.float32}
