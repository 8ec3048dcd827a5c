"""Whole runs of exported transformers under every layout of up to four ranks: the curve and the model of one rank.

pytest tests/torch/test_export_layouts.py             # some of each export
pytest -m chaos tests/torch/test_export_layouts.py    # the others
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
import numpy as np
import numpy.typing as npt
import onnx
import yaml
from data_sets import write_batches
from kernels import needs_kernels
from layout_table import PARALLEL
from onnx import numpy_helper
from project import command, curve, logs

if TYPE_CHECKING:
    from workshop import Workshop

pytestmark = needs_kernels
STEPS = 20
GLOBAL_BATCH = 8
NAMES = ("gpt2", "bert", "llama", "t5")
RECOMPUTED = {"recompute": "layers"}


class Layout(NamedTuple):
    """Ranks, how they divide the model, and further keys of the section `model`.

    Replicas accumulate four micro-batches of 2 samples if there is one, and two if there are two.
    """

    ranks: int
    parallel: dict[str, Any]
    model: Mapping[str, Any] = MappingProxyType({})
    micro_batch: int = 2


ONE_RANK = Layout(1, {})
# The number of replicas follows from the ranks.
DERIVED = {
    name: {key: degree for key, degree in parallel.items() if key != "data"} for name, (_, parallel) in PARALLEL.items()
}
LAYOUTS = {
    **{name: Layout(ranks, DERIVED[name]) for name, (ranks, _) in PARALLEL.items()},
    "data-4-accumulation": Layout(*PARALLEL["data-4"], micro_batch=1),
    "zero-3-of-4": Layout(*PARALLEL["zero-3-of-4"], micro_batch=1),
    **{
        f"recompute-{name}": Layout(*PARALLEL[name], RECOMPUTED)
        for name in ("data-2", "zero-3", "pipeline-2", "horizontal-2", "sequence-2")
    },
}
ALWAYS = (
    "pipeline-2", "horizontal-2", "pipeline-3", "data-2-pipeline-2-zero-1", "pipeline-2-horizontal-2",
    "data-2-horizontal-2-zero-2", "sequence-2", "pipeline-2-sequence-2", "zero-3", "recompute-pipeline-2",
)  # fmt: skip
OTHERS = (pytest.mark.chaos, pytest.mark.skipif("ORTFLOW_CHAOS" in os.environ, reason="not in a short round"))


@pytest.fixture(scope="module")
def trained(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Layout, str], Path]:
    """Runs of 20 steps, by export and layout; that of one rank is made once."""
    from workshop import CASES

    folders: dict[str, Path] = {}
    alone: dict[str, Path] = {}

    def train(export: str, layout: Layout, name: str) -> Path:
        case = CASES[export]
        if export not in folders:
            folders[export] = tmp_path_factory.mktemp(export)
            write_batches(folders[export] / "set.arrow", *case.batches(STEPS * GLOBAL_BATCH // 4))
        if layout is ONE_RANK and export in alone:
            return alone[export]
        model = {
            "path": str(workshop.model(export, "for_training", 18)), "loss": case.loss.model_dump(mode="json"),
            "labels": list(case.labels),
        }  # fmt: skip
        found = run(folders[export], name, model, layout)
        if layout is ONE_RANK:
            alone[export] = found
        return found

    return train


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else OTHERS) for name in LAYOUTS])
@pytest.mark.parametrize("export", NAMES)
def test_exports_train_under_every_layout(export: str, name: str, trained: Callable[[str, Layout, str], Path]) -> None:
    found, alone = trained(export, LAYOUTS[name], name), trained(export, ONE_RANK, "one-rank")
    assert len(curve(found)) == STEPS
    np.testing.assert_allclose(np.array(curve(found)), np.array(curve(alone)), rtol=1e-5, atol=1e-5)
    here, there = parameters(found), parameters(alone)
    assert here.keys() == there.keys()
    for tensor, values in there.items():
        np.testing.assert_allclose(here[tensor], values, rtol=1e-5, atol=1e-5, err_msg=tensor)


def run(folder: Path, name: str, model: dict[str, Any], layout: Layout) -> Path:
    """The run directory of a run of 20 steps; SGD, because Adam makes steps of the rounding in vanishing gradients."""
    section = {
        "name": name,
        "model": {**model, **layout.model},
        "data": {"train": "set.arrow", "micro_batch": layout.micro_batch},
        "train": {
            "steps": STEPS, "global_batch": GLOBAL_BATCH, "clip_norm": 1.0,
            "optimizer": {"name": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
        },
        "parallel": layout.parallel,
        "resources": {"ranks_per_node": layout.ranks, "cpus_per_rank": 1},
        "restart": {"failures": 0},
    }  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(section))
    done = command("run", file.name, folder=folder, timeout=300)
    run_dir = folder / "runs" / name
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(run_dir)}"
    assert not layout.model or "recomputed for the backward pass" in logs(run_dir)
    return run_dir


def parameters(run_dir: Path) -> dict[str, npt.NDArray[Any]]:
    exported = onnx.load(run_dir / "export" / "model.onnx")
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in exported.graph.initializer}
    return {name: values for name, values in found.items() if values.dtype == np.float32}
