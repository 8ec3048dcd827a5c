"""A value that is in a type and not in the function that reads it is an error, not the function's last branch."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from closed_chains import closed_sets, open_ends
from run_files import spec_of

from ortflow.launchers.kubernetes.mpirun import hostfile
from ortflow.manifests.local import Mpi, command
from ortflow.manifests.slurm import directives
from ortflow.workflow.data.batches import evaluation_batches
from ortflow.workflow.data.epoch_positions import Plan
from ortflow.workflow.fusion.halved import scaled
from ortflow.workflow.graph.ir.edit import Editor
from ortflow.workflow.graph.objective.by_element import FORMULAS
from ortflow.workflow.graph.objective.compared import Comparison
from ortflow.workflow.graph.objective.metrics import ATTACH
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.graph import UPDATES
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.parallel.schedule import schedule
from ortflow.workflow.program.coordinator import Coordinator
from ortflow.workflow.spec.losses import Regression
from ortflow.workflow.spec.metrics import MetricSection
from ortflow.workflow.spec.optimizers import Adam
from ortflow.workflow.trainer.metric_values import of_counts
from ortflow.workflow.trainer.opening import LOOPS

NEW: Any = "new"
ROOT = Path(__file__).resolve().parents[2]


def adam() -> None:
    rule = Adam(name="adamw", lr=1.0).model_copy(update={"name": NEW})
    UPDATES["adamw"](Builder("optimizer"), rule, [Segment(0, 128, 0.1)])


def two_ranks(mpi: Mpi) -> list[str]:
    return command(spec_of(resources={"ranks_per_node": 2}), Path("/runs/a"), "python", mpi)


def gpus() -> object:
    spec = spec_of(resources={"gpus_per_rank": 1}, backends={"slurm": {}})
    slurm = spec.backends.slurm.model_copy(update={"gpus_as": NEW})
    backends = spec.backends.model_copy(update={"slurm": slurm})
    return list(directives._gpus(spec.model_copy(update={"backends": backends}), "srun"))


def error_of_a_metric() -> None:
    edit = Editor(onnx.GraphProto())
    of = Comparison("values", "y", "labels", "counted", 1, None, 1, "labels", "model.metrics[0]")
    ATTACH["mae"](edit, MetricSection(name="mae").model_copy(update={"name": NEW}), of)


READERS: dict[str, Callable[[], object]] = {
    "loss": lambda: FORMULAS[Regression](
        Editor(onnx.GraphProto()), Regression(kind="mse").model_copy(update={"kind": NEW}), "y", "labels"
    ),
    "schedule of a pipeline": lambda: schedule(NEW, 2, 4),
    "last batch": lambda: Plan(11, 2, 1, 1, NEW).steps_per_epoch,
    "evaluation": lambda: evaluation_batches([], [], micro_batch=1, rank=0, world_size=2, mode=NEW),
    "adam": adam,
    "mpirun": lambda: two_ranks(Mpi(NEW, "mpirun")),
    "GPUs of a node": gpus,
    "precision": lambda: scaled(onnx.ModelProto(), [], NEW),
    "hosts": lambda: hostfile(NEW, ["a"], 2),
    "metric": error_of_a_metric,
    "average of a metric": lambda: of_counts(
        MetricSection(name="f1", label="y").model_copy(update={"average": NEW}), "classes", np.ones((3, 4))
    ),
    "trainer": lambda: LOOPS[NEW],
    "message of a rank": lambda: Coordinator(1).receive(0, {"kind": NEW}, 0.0),
}


@pytest.mark.parametrize("reader", READERS)
def test_an_unknown_value_is_an_error(reader: str) -> None:
    with pytest.raises((AssertionError, KeyError), match=NEW):
        READERS[reader]()


def test_no_chain_over_a_closed_set_ends_in_what_is_left() -> None:
    packages = ("workflow", "launchers", "manifests", "ortflow")
    texts = {path: path.read_text() for name in packages for path in (ROOT / name).rglob("*.py")}
    sets = closed_sets([ast.parse(text) for text in texts.values() if "Literal[" in text])
    assert frozenset({"drop", "keep", "pad"}) in sets
    comparing = {path: ast.parse(text) for path, text in texts.items() if '== "' in text or 'in ("' in text}
    ends = [f"{path}:{line}: {subject}" for path, tree in comparing.items() for line, subject in open_ends(tree, sets)]
    assert ends == [], "end them with assert_never"


@pytest.mark.parametrize(
    ("source", "subjects"),
    [
        ('if a.kind == "x":\n    1\nelif a.kind == "y":\n    2\nelse:\n    3', ["a.kind"]),
        ('1 if kind in ("x", "y") else 3', ["kind"]),
        ('1 if kind == "x" else 2 if kind == "y" else 3', ["kind"]),
        ('if kind == "x":\n    1\nelif kind == "y":\n    2\nelse:\n    assert_never(kind)', []),
        ('if kind == "x":\n    1\nelif kind == "y":\n    2', []),
        ('if kind == "x":\n    1\nelse:\n    2', []),
    ],
)
def test_which_chains_end_in_what_is_left(source: str, subjects: list[str]) -> None:
    tree = ast.parse(source)
    assert [subject for _, subject in open_ends(tree, {frozenset({"x", "y", "z"})})] == subjects
