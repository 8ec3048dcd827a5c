"""The table of optimizers agrees with the run file's keys, the update graphs and the segments."""

from __future__ import annotations

from typing import Any

import pytest
from messages import mentions
from pydantic import TypeAdapter

from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.memory import HELP
from ortflow.workflow.optim.graph import UPDATES, optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.spec.file.keys import choices
from ortflow.workflow.spec.optimizers import OPTIMIZERS, Optimizer, moments
from ortflow.workflow.spec.train import TrainSection

INDEX = FlatIndex.place([Tensor("matrix", (5, 3), "decay"), Tensor("kernel", (3, 3), "decay")])


def optimizer(name: str, **keys: Any) -> Optimizer:
    made: Optimizer = TypeAdapter(Optimizer).validate_python({"name": name, "lr": 0.1, **keys})
    return made


def test_keys_table_and_updates_name_the_same_optimizers() -> None:
    assert [*OPTIMIZERS] == choices(TrainSection.model_fields["optimizer"])
    assert OPTIMIZERS.keys() == UPDATES.keys()


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_writes_the_moments_of_the_table(name: str, kernels: bool) -> None:
    known = OPTIMIZERS[name]
    keys = [key for key in known.moments.values() if key is not None]
    rule = optimizer(name, **{key: True if key == "centered" else 0.5 for key in keys})
    assert moments(rule) == tuple(known.moments)
    if name == "muon":
        rule = optimizer(name, adamw=["*"])  # matrices have no second moment
    parts = segments(rule, INDEX)
    assert len(parts) == (2 if known.whole_tensors else 1)
    written = {output for node in optimizer_graph(rule, parts, kernels=kernels).graph.node for output in node.output}
    expected = {f"{moment}.{i}.out" for moment in ("parameters", *known.moments) for i in range(len(parts))}
    assert {output for output in written if output.endswith(".out")} == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_moment_is_kept_only_with_its_key(name: str) -> None:
    always = tuple(moment for moment, key in OPTIMIZERS[name].moments.items() if key is None)
    assert moments(optimizer(name)) == always


def test_the_advice_on_memory_names_every_optimizer() -> None:
    _, fix = HELP["moments"]
    assert mentions(fix, "adamw 2, lamb 2, sgd 1 … momentum … rmsprop 1 … centered and momentum")
    assert all(name in fix for name in OPTIMIZERS)
