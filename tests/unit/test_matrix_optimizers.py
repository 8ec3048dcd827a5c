"""Muon and Adafactor in a trainer: with groups and an average, resumed; and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_build_models import built
from messages import mentions
from run_files import spec_of
from sharing_ranks import Job, graphs_of, leave, perceptron, take_up
from trainers import opened

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.optim.segments import segments_of
from ortflow.workflow.run.pace import pace_of_steps
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.trainer.step import GraphTrainer

RULES: dict[str, dict[str, Any]] = {
    "muon": {"name": "muon", "lr": 0.02, "adamw": ["third"], "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 0.05},
}


@pytest.mark.parametrize("rule", RULES)
def test_a_resumed_run_has_the_same_bits(rule: str, tmp_path: Path) -> None:
    changes = {
        "train__optimizer": RULES[rule], "train__average": {"name": "ema"},
        "train__groups": [{"match": ["second"], "frozen_until": "2 steps"}],
    }  # fmt: skip
    job = Job(rule, graphs_of(perceptron(tmp_path / "model.onnx"), **changes), changes)

    def made() -> GraphTrainer:
        return opened(GraphSet.load(Path(job.graphs)), job.spec(1), SoloCommunicator())

    def steps(trainer: GraphTrainer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            trainer.at(pace_of_steps(step), 0.1)
            batches = job.batches(0, 0, 1)
            outcome = trainer.step(batches, learning_rate=RULES[rule]["lr"], update=step, seeds=[1], control_values=[])
            losses.append(outcome.loss)
        return losses

    whole, parts, store = made(), made(), DirectoryStore(tmp_path / "checkpoints")
    losses = steps(whole, 1, 12)
    assert losses[-1] < 0.95 * losses[0]
    steps(parts, 1, 5)
    leave(parts, store, SoloCommunicator())
    resumed = made()
    take_up(resumed, store)
    resumed.restore(parts.numbers())
    steps(resumed, 6, 12)
    for name, buffer in whole.state().items():
        np.testing.assert_array_equal(resumed.state()[name].read(), buffer.read())  # type: ignore[union-attr]


def test_adamw_has_its_own_rate_and_the_parameters_that_it_is_given(tmp_path: Path) -> None:
    job = Job("muon", "", {"train__optimizer": RULES["muon"], "train__groups": [{"match": ["b"], "lr": 0.5}]})
    graphs = built(perceptron(tmp_path / "model.onnx"), **job.changes)
    names = {entry.offset: entry.name for entry in graphs.index}
    spec = Job(**{**vars(job), "graphs": str(graphs.root)}).spec(1)
    found = {names[cut.start]: (cut.shape, cut.lr_scale) for cut in segments_of(spec.train, graphs.index)}
    adamw = pytest.approx(3e-4 / 0.02)
    assert found["first"] == ((5, 37), 1.0)
    assert (found["third"], found["a"], found["b"]) == ((None, adamw), (None, adamw), (None, pytest.approx(25.0)))


def test_a_pattern_of_adamw_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        built(perceptron(tmp_path / "model.onnx"), train__optimizer={"name": "muon", "lr": 0.1, "adamw": ["thrid"]})
    assert mentions(str(error.value), "train.optimizer.adamw[0] … 'thrid' … third")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"resources": {"ranks_per_node": 2, "gpus_per_rank": 1}, "parallel": {"pipeline": 2}},
            "which is not supported in divided models on GPUs",
        ),
        ({"resources": {"ranks_per_node": 2}, "parallel": {"zero": 1}}, "parallel.zero divides them over ranks"),
        (
            {"resources": {"ranks_per_node": 2}, "parallel": {"horizontal": 2}},
            "parallel.horizontal divides them over ranks",
        ),
        (
            {"resources": {"ranks_per_node": 4}, "parallel": {"pipeline": 2, "zero": 1}},
            "parallel.zero divides them over ranks",
        ),
    ],
)
def test_layouts_without_whole_tensors_are_refused(rule: str, more: dict[str, Any], expected: str) -> None:
    spec = spec_of(train={"steps": 100, "optimizer": RULES[rule]}, **more)
    found = [f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in check(spec)]
    assert any(mentions(line, f"train.optimizer.name: is {rule} … {expected}") for line in found), found


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_gpus_that_have_whole_models_have_everything(rule: str, ranks: int, precision: str) -> None:
    train = {
        "steps": 100, "optimizer": RULES[rule], "average": {"name": "ema"}, "precision": precision,
        "groups": [{"match": ["*"], "frozen_until": "3 steps"}],
    }  # fmt: skip
    assert not check(spec_of(train=train, resources={"ranks_per_node": ranks, "gpus_per_rank": 1}))


@pytest.mark.parametrize("rule", RULES)
def test_off_loaded_moments_are_refused(rule: str) -> None:
    train = {"steps": 100, "optimizer": RULES[rule], "offload": "optimizer"}
    found = check(spec_of(train=train, resources={"gpus_per_rank": 1}))
    assert [problem.what for problem in found] == [f"is {rule}, which is not supported with train.offload"]


@pytest.mark.parametrize("rule", RULES)
def test_stages_of_a_pipeline_have_whole_tensors(rule: str) -> None:
    frozen = [{"match": ["*"], "frozen_until": "3 steps"}]
    train = {"steps": 100, "optimizer": RULES[rule], "groups": frozen}
    assert not check(spec_of(train=train, resources={"ranks_per_node": 4}, parallel={"pipeline": 2}))
