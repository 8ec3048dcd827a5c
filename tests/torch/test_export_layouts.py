"""Whole runs of exported transformers under every layout of up to four ranks: the curve and the model of one rank.

pytest tests/torch/test_export_layouts.py                             # two of them
ORTFLOW_PART=3/13 pytest tests/torch/test_export_layouts.py           # and every thirteenth of the others
pytest -m "chaos or not chaos" tests/torch/test_export_layouts.py     # all
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from project import FEW_CORES, command, curve, logs
from rotation import rotating

from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.store import DirectoryStore

if TYPE_CHECKING:
    from workshop import Workshop

pytestmark = needs_kernels
STEPS = 20
GLOBAL_BATCH = 8
LIMIT = 900
"""Seconds of a run, at most: in CI other tests have precedence."""
MODEL = Path("export", "model.onnx")
EXPORTS = ("gpt2", "bert", "llama", "t5")
OPSETS = {"for_training": 18, "torchscript": 17, "dynamo": 18}
RECOMPUTED = {"recompute": "layers"}
MOVED = 5e-5
"""What training changes in each parameter, at least: fifty times the absolute tolerance."""
HARDLY_MOVED = {"bert": ("attention.self.key.bias", "attention.self.query.bias")}
"""Other parameters. A key's bias shifts all scores of a query alike. BERT's first weights are so small that scores are
almost equal, whatever the query is."""


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
OF_OTHER_EXPORTERS = ("horizontal-2", "zero-3")


class Cell(NamedTuple):
    """A row and a column of the table of exports and layouts."""

    export: str
    exporter: str
    layout: str


def cells() -> Iterator[tuple[str, Cell]]:
    """Every cell, by name."""
    for layout in LAYOUTS:
        for export in EXPORTS:
            yield f"{export}-{layout}", Cell(export, "for_training", layout)
    for layout in OF_OTHER_EXPORTERS:
        for export in EXPORTS:
            for exporter in ("torchscript",) if export == "t5" else ("torchscript", "dynamo"):  # fails with T5
                yield f"{export}-{exporter}-{layout}", Cell(export, exporter, layout)


CELLS = dict(cells())
CORE = ("gpt2-zero-3", "bert-pipeline-2-sequence-2")


@pytest.fixture(scope="module")
def trained(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell, Layout], Path]:
    """Runs of 20 steps of a cell's export; that of one rank is made once, and has trained."""
    from workshop import CASES

    folders: dict[str, Path] = {}
    alone: dict[Path, Path] = {}

    def train(cell: Cell, layout: Layout) -> Path:
        case = CASES[cell.export]
        if cell.export not in folders:
            folders[cell.export] = tmp_path_factory.mktemp(cell.export)
            write_batches(folders[cell.export] / "set.arrow", *case.batches(STEPS * GLOBAL_BATCH // 4))
        path = workshop.model(cell.export, cell.exporter, OPSETS[cell.exporter])
        if layout is ONE_RANK and path in alone:
            return alone[path]
        model = {"path": str(path), "loss": case.loss.model_dump(mode="json"), "labels": list(case.labels)}
        name = f"{cell.exporter.replace('_', '-')}-{'one-rank' if layout is ONE_RANK else cell.layout}"
        found = run(folders[cell.export], name, model, layout)
        if layout is ONE_RANK:
            has_trained(found, path, HARDLY_MOVED.get(cell.export, ()))
            alone[path] = found
        return found

    return train


@pytest.mark.parametrize("name", rotating(CELLS, CORE))
def test_exports_train_under_every_layout(name: str, trained: Callable[[Cell, Layout], Path]) -> None:
    cell = CELLS[name]
    layout, about = LAYOUTS[cell.layout], f"{cell.export} from {cell.exporter} under {cell.layout}"
    alone, found = trained(cell, ONE_RANK), trained(cell, layout)
    assert len(curve(found)) == STEPS, about
    for rank in range(layout.ranks):
        np.testing.assert_allclose(
            np.array(curve(found, rank)), np.array(curve(alone)), rtol=1e-5, atol=1e-6, err_msg=f"{about}, rank {rank}"
        )
    here, there = parameters(found / MODEL), parameters(alone / MODEL)
    assert here.keys() == there.keys(), about
    for tensor, values in there.items():
        np.testing.assert_allclose(here[tensor], values, rtol=1e-5, atol=1e-6, err_msg=f"{about}: {tensor}")


def has_trained(run_dir: Path, model: Path, hardly_moved: tuple[str, ...]) -> None:
    """The parameters are others than in the model that the run began with."""
    before, after = parameters(model), parameters(run_dir / MODEL)
    index = load(DirectoryStore(run_dir / "checkpoints"), STEPS).manifest.index
    names = [entry.name for entry in index if entry.tensor.group in ("decay", "no_decay")]
    moved = {name: float(np.abs(after[name] - before[name]).max()) for name in names}
    still = {name for name, change in moved.items() if change < MOVED}
    assert still == {name for name in names if name.endswith(hardly_moved)}, moved


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
    # Ranks that divide layers wait for each other many times a step. One layout keeps MPICH's own choice of sums.
    settings = {} if layout is LAYOUTS["horizontal-2"] else FEW_CORES
    done = command("run", file.name, folder=folder, timeout=LIMIT, **settings)
    run_dir = folder / "runs" / name
    assert done.returncode == 0, f"{folder.name} {name}\n{done.stdout}\n{done.stderr}\n{logs(run_dir)}"
    assert not layout.model or "recomputed for the backward pass" in logs(run_dir)
    return run_dir


def parameters(model: Path) -> dict[str, npt.NDArray[Any]]:
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(model).graph.initializer}
    return {name: values for name, values in found.items() if values.dtype == np.float32}
