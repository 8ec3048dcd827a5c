"""Groups of parameters: learning rates, decay, thawing at a step, resumed and under ZeRO; bad groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from graph_build_models import built, run_file
from messages import mentions
from run_files import spec_of
from sharing_ranks import Job, graphs_of, leave, perceptron, run_ranks, take_up
from trainers import opened

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.optim.segments import Segment, segments_of
from ortflow.workflow.run.pace import pace_of_steps
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.trainer.step import GraphTrainer

Array = npt.NDArray[Any]
GROUPS = [
    {"match": ["second", "b"], "lr_scale": 0.1, "weight_decay": 0.3},
    {"match": ["third"], "frozen_until": "3 steps"},
    {"match": ["a"], "frozen_until": "2 steps", "lr": 0.05},
]
CHANGES = {
    "train__optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}, "train__groups": GROUPS,
    "train__clip_norm": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    graphs = graphs_of(perceptron(tmp_path_factory.mktemp("groups") / "model.onnx"), **CHANGES)
    return Job("groups", graphs, CHANGES)


def trainer_of(job: Job) -> GraphTrainer:
    return opened(GraphSet.load(Path(job.graphs)), job.spec(1), SoloCommunicator())


def steps(trainer: GraphTrainer, job: Job, first: int, last: int) -> list[dict[str, Array]]:
    """Buffers behind each of the steps, from 1."""
    found = []
    for step in range(first, last + 1):
        trainer.at(pace_of_steps(step))
        batches = job.batches(step, 0, 1)
        outcome = trainer.step(batches, learning_rate=1e-2, update=step, seeds=[1], control_values=[])
        assert outcome.skipped is None
        found.append({name: buffer.read().copy() for name, buffer in trainer.state().items()})  # type: ignore[union-attr]
    return found


def test_a_frozen_group_stays_bit_by_bit_and_then_trains(job: Job) -> None:
    trainer = trainer_of(job)
    before = {name: buffer.read().copy() for name, buffer in trainer.state().items()}  # type: ignore[union-attr]
    found = steps(trainer, job, 1, 5)
    for name, until in (("third", 3), ("a", 2), ("first", 0)):
        entry = trainer.index[name]
        for number, state in enumerate(found, 1):
            for buffer, values in state.items():
                same = np.array_equal(
                    values[entry.offset : entry.end].view(np.uint32),
                    before[buffer][entry.offset : entry.end].view(np.uint32),
                )
                assert same == (number <= until), (name, number, buffer)
    assert trainer.numbers() == {"frozen_updates.1": 3.0, "frozen_updates.2": 2.0}


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_a_resumed_run_has_the_same_bits(job: Job, stop: int, tmp_path: Path) -> None:
    expected = steps(trainer_of(job), job, 1, 6)[-1]
    first, store = trainer_of(job), DirectoryStore(tmp_path)
    steps(first, job, 1, stop)
    leave(first, store, SoloCommunicator())
    second = trainer_of(job)
    take_up(second, store)
    second.restore(first.numbers())
    found = steps(second, job, stop + 1, 6)[-1]
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_every_stage_of_zero_does_the_same(job: Job, tmp_path: Path) -> None:
    scaled = {"train__optimizer": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1}, "train__groups": GROUPS[:1]}
    lamb = graphs_of(perceptron(tmp_path / "model.onnx"), **scaled)
    jobs = [Job(f"groups.{stage}", job.graphs, CHANGES, stage) for stage in range(4)]
    jobs += [Job(f"lamb.{stage}", lamb, scaled, stage) for stage in range(4)]
    ranks = run_ranks(2, tmp_path / "ranks", jobs, SMALL="64")
    for each in jobs:
        outcome, alone = ranks[0][each.name], ranks[0][f"{each.name.partition('.')[0]}.0"]
        np.testing.assert_allclose(outcome.curve, alone.curve, rtol=1e-5)
        parts = [rank[each.name].state["parameters"] for rank in ranks]
        parameters = np.concatenate(parts) if outcome.sharded else parts[0]
        np.testing.assert_allclose(parameters, alone.state["parameters"], rtol=1e-5, atol=1e-6)


def test_layers_have_falling_rates() -> None:
    names = ["embed.w", *(f"block.{number}.w" for number in range(12)), "head.w"]
    spec = run_file(
        Path("model.onnx"),
        train__optimizer={"name": "sgd", "lr": 0.1},
        train__layer_decay={"factor": 0.5, "layers": ["embed.*", "block.{0-11}.*", "head.*"]},
    )
    flat = FlatIndex.place([Tensor(name, (64,), "decay") for name in names])
    found = segments_of(spec.train, flat)
    assert [segment.lr_scale for segment in found] == [0.5 ** (13 - number) for number in range(14)]
    plain = run_file(Path("model.onnx"), train__optimizer={"name": "sgd", "lr": 0.1})
    assert segments_of(plain.train, flat) == [Segment(0, 14 * 64, 0.0)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train__groups": [{"match": ["thrid"], "lr": 1.0}]}, "train.groups[0].match[0] … 'thrid' … third"),
        (
            {"train__groups": [{"match": ["a"], "lr": 1.0}, {"match": ["?"], "lr": 2.0}]},
            "train.groups … a is in group 0 and in group 1",
        ),
        (
            {"train__layer_decay": {"factor": 0.5, "layers": ["first", "second"]}},
            "train.layer_decay.layers … is in no layer",
        ),
        (
            {"train__layer_decay": {"factor": 0.5, "layers": ["first", "*"]}},
            "train.layer_decay.layers … first is in layer 0 and in layer 1",
        ),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        built(perceptron(tmp_path / "model.onnx"), **changes)
    assert mentions(str(error.value), expected)
    assert not list((tmp_path / "graphs").glob("*.json"))


@pytest.mark.parametrize(
    ("groups", "more", "expected"),
    [
        ([{"match": ["a"]}], {}, "train.groups.0: changes nothing"),
        ([{"match": ["a"], "lr": 1.0, "lr_scale": 2.0}], {}, "train.groups.0.lr_scale: cannot be combined"),
        ([{"match": ["a"], "frozen_until": "soon"}], {}, "train.groups.0.frozen_until: 'soon' is not a duration"),
        (
            [{"match": ["a"], "frozen_until": "5 steps"}],
            {"resources": {"gpus_per_rank": 1, "ranks_per_node": 2}, "parallel": {"zero": 2}},
            "train.groups.0.frozen_until: is not supported under ZeRO on GPUs",
        ),
        (
            [{"match": ["a"], "frozen_until": "5 steps"}],
            {"resources": {"gpus_per_rank": 1, "ranks_per_node": 2}, "parallel": {"horizontal": 2}},
            "train.groups.0.frozen_until: is not supported in divided models on GPUs",
        ),
        (
            [{"match": ["a"], "frozen_until": "5 steps"}],
            {
                "parallel": {"pipeline": 2}, "resources": {"ranks_per_node": 2},
                "train": {"steps": 9, "optimizer": {"name": "lamb", "lr": 1.0}},
            },
            "train.groups.0.frozen_until: is not supported with lamb in a divided model",
        ),
        (
            [{"match": ["a"], "lr": 1.0}], {"trainer": {"name": "linear"}, "model": None},
            "train.groups: is for the trainer graph",
        ),
    ],
)  # fmt: skip
def test_groups_that_contradict_themselves_are_named(
    groups: list[dict[str, Any]], more: dict[str, Any], expected: str
) -> None:
    train = {"steps": 100, "optimizer": {"name": "sgd", "lr": 0.1}, "groups": groups, **more.get("train", {})}
    spec = spec_of(**{**more, "train": train})
    found = [f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in check(spec)]
    assert any(line.startswith(expected) for line in found), found
