"""A rule that reads norms of whole tensors, where ranks hold pieces of them: as on one rank, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lars_ranks
import numpy as np
import pytest
from dividing_ranks import Divided, plain, run_grid
from graph_build_models import built, run_file
from lars_ranks import RULES, SETTINGS, Rule, moved, registered, run_ranks
from sharing_ranks import Job, graphs_of, perceptron
from trainers import write_update

from ortflow.workflow.errors import UserError
from ortflow.workflow.optim import graph as update_graphs
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment, pieces
from ortflow.workflow.optim.whole_tensors import norm_graphs
from ortflow.workflow.spec.optimizers import OPTIMIZERS, Sgd

RANKS = 3


@pytest.mark.parametrize("rule", RULES)
def test_under_zero_the_run_is_that_of_one_rank(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(RULES[rule], monkeypatch)
    model = perceptron(tmp_path / "model.onnx")
    graphs = built(model)
    write_update(graphs, run_file(model, **SETTINGS))
    jobs = [Job(f"stage-{stage}", str(graphs.root), SETTINGS, stage) for stage in (1, 2, 3)]
    (alone,) = run_ranks(rule, 1, tmp_path / "one", [Job("alone", str(graphs.root), SETTINGS)])
    found = run_ranks(rule, RANKS, tmp_path / "several", jobs)
    expected = alone["alone"]
    for job in jobs:
        np.testing.assert_allclose(found[0][job.name].curve, expected.curve, rtol=2e-6, err_msg=job.name)
        for name, values in expected.state.items():
            parts = [rank[job.name].state[name] for rank in found]
            whole = parts[0] if parts[0].size == values.size else np.concatenate(parts)
            np.testing.assert_allclose(whole, values, rtol=2e-6, atol=2e-7, err_msg=f"{job.name} {name}")


@pytest.mark.parametrize(("data", "parts", "stage"), [(1, 2, 0), (2, 2, 1)])
def test_in_a_divided_model_the_run_is_that_of_one_rank(
    data: int, parts: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(RULES["lars"], monkeypatch)
    graphs = graphs_of(perceptron(tmp_path / "model.onnx"), **SETTINGS)
    divided = Divided(Job("lars", graphs, SETTINGS, stage), data, parts)
    program = (lars_ranks.__file__, "dividing", "lars")
    curve, state = run_grid(data, parts, tmp_path / "world", [divided], program)[divided.name]
    alone = plain(divided.job)
    np.testing.assert_allclose(curve[:-1], alone.curve, rtol=2e-6)
    for name, whole in alone.state.items():
        np.testing.assert_allclose(state[name], whole, rtol=2e-6, atol=2e-7, err_msg=name)


def register(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> Sgd:
    for table, entries in zip((OPTIMIZERS, update_graphs.UPDATES), registered(rule), strict=True):
        monkeypatch.setitem(table, "sgd", entries["sgd"])  # type: ignore[index]
    return Sgd(name="sgd", lr=0.1, momentum=0.9)


def by_reduction(build: Builder, optimizer: Sgd, segments: Sequence[Segment]) -> None:
    for i in range(len(segments)):
        moved(build, optimizer, i, build("ReduceMax", f"gradients.{i}", keepdims=1))


def of_all(build: Builder, optimizer: Sgd, segments: Sequence[Segment]) -> None:
    for i in range(len(segments)):
        first = build("Mul", f"gradients.{i}", f"gradients.{(i + 1) % len(segments)}")
        moved(build, optimizer, i, build.root(build.square_sum(first)))


def of_norms(build: Builder, optimizer: Sgd, segments: Sequence[Segment]) -> None:
    for i in range(len(segments)):
        unit = build("Div", f"gradients.{i}", build.root(build.square_sum(f"gradients.{i}")))
        moved(build, optimizer, i, build.root(build.square_sum(unit)))


def of_some(build: Builder, optimizer: Sgd, segments: Sequence[Segment]) -> None:
    for i in range(len(segments)):
        moved(build, optimizer, i, build.root(build.square_sum(f"gradients.{i}")) if i else "learning_rate")


@pytest.mark.parametrize(
    ("rule", "reported"),
    [
        (by_reduction, "ReduceMax"),
        (of_all, "several tensors"),
        (of_norms, "depends on another norm"),
        (of_some, "other norms of one tensor than of another"),
    ],
)
def test_what_cannot_be_divided_is_refused(rule: Rule, reported: str, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = register(rule, monkeypatch)
    whole = [Segment(0, 128, 0.0), Segment(128, 256, 0.0)]

    def divide() -> None:
        norm_graphs(optimizer, whole).first(pieces(whole, 0, 192))

    with pytest.raises(UserError, match=reported) as raised:
        divide()
    assert raised.value.where == "train.optimizer"
