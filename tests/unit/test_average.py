"""Averaged weights: their numbers, evaluation, resuming on other ranks, ZeRO; bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from run_files import spec_of
from sharing_ranks import Job, graphs_of, leave, perceptron, run_ranks, saved_buffers, take_up
from trainers import opened

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.optim.average import average_rate
from ortflow.workflow.run.pace import pace_of_steps
from ortflow.workflow.spec.averages import Ema, Swa
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.trainer.step import GraphTrainer

Array = npt.NDArray[Any]
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1},
    "lamb": {"name": "lamb", "lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"name": "sgd", "lr": 1e-2, "momentum": 0.9},
}


def changes_of(rule: str, **more: Any) -> dict[str, Any]:
    return {"train__optimizer": RULES[rule], "train__average": {"name": "ema", "decay": 0.75}, **more}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    folder = tmp_path_factory.mktemp("average")
    made = {}
    for rule in RULES:
        (folder / rule).mkdir()
        graphs = graphs_of(perceptron(folder / rule / "model.onnx"), **changes_of(rule))
        made[rule] = Job(rule, graphs, changes_of(rule))
    return made


def trainer_of(job: Job) -> GraphTrainer:
    return opened(GraphSet.load(Path(job.graphs)), job.spec(1), SoloCommunicator())


def buffers(trainer: GraphTrainer) -> dict[str, Array]:
    return {name: buffer.read().copy() for name, buffer in trainer.state().items()}  # type: ignore[union-attr]


def step(trainer: GraphTrainer, job: Job, number: int, rate: float) -> dict[str, Array]:
    """The buffers behind a step."""
    trainer.at(pace_of_steps(number), rate)
    batches = job.batches(number, 0, 1)
    trainer.step(batches, learning_rate=1e-2, update=number, seeds=[1], control_values=[])
    return buffers(trainer)


SECTIONS = {
    "ema": Ema(name="ema", decay=0.9),
    "ema with a warm-up": Ema(name="ema", decay=0.9, warmup=True),
    "ema that starts later": Ema(name="ema", decay=0.9, start="4 steps", every="2 steps"),
    "swa": Swa(name="swa", start="4 steps", every="3 steps"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", SECTIONS)
def test_the_average_is_that_of_its_definition(jobs: dict[str, Job], rule: str, case: str) -> None:
    section, trainer = SECTIONS[case], trainer_of(jobs[rule])
    trained = trainer.index.trained
    start = buffers(trainer)
    np.testing.assert_array_equal(start["average"], start["parameters"][:trained])
    expected, averaged, taken = start["average"].astype(np.float64), 0, list[Array]()
    for number in range(1, 13):
        rate, counts = average_rate(section, pace_of_steps(number), averaged)
        averaged += counts
        found = step(trainer, jobs[rule], number, rate)
        weights = found["parameters"][:trained].astype(np.float64)
        if isinstance(section, Swa):
            if number >= 4 and (number - 4) % 3 == 0:
                taken.append(weights)
            expected = np.mean(taken, axis=0) if taken else weights
        elif section.start is None:
            decay = min(0.9, number / (9 + number)) if section.warmup else 0.9
            expected = decay * expected + (1 - decay) * weights
        elif number < 4:
            expected = weights
        elif number % 2 == 0:
            expected = 0.9 * expected + 0.1 * weights
        np.testing.assert_allclose(found["average"], expected, rtol=1e-6, atol=1e-7)
        if number < 4 and section.start is not None:
            np.testing.assert_array_equal(found["average"], found["parameters"][:trained])
    assert averaged == {"ema": 12, "ema with a warm-up": 12, "ema that starts later": 5, "swa": 3}[case]


def test_an_evaluation_sees_the_average_and_leaves_every_bit(jobs: dict[str, Job]) -> None:
    job, trainer = jobs["adamw"], trainer_of(jobs["adamw"])
    for number in range(1, 5):
        before = step(trainer, job, number, 0.25)
    batches = job.batches(9, 0, 1)
    of_weights = trainer.evaluate(batches, list).metrics["loss"]
    trainer.exchange_average()
    inside, of_average = buffers(trainer), trainer.evaluate(batches, list).metrics["loss"]
    trainer.exchange_average()
    np.testing.assert_array_equal(inside["parameters"][: trainer.index.trained], before["average"])
    assert of_average != of_weights
    for name, values in buffers(trainer).items():
        np.testing.assert_array_equal(values, before[name])


def test_a_skipped_step_changes_no_average(jobs: dict[str, Job]) -> None:
    job, trainer = jobs["adamw"], trainer_of(jobs["adamw"])
    before = step(trainer, job, 1, 0.25)
    trainer.at(pace_of_steps(2), 0.25)
    (batch,) = job.batches(2, 0, 1)
    batch.arrays["x"][0, 0] = np.nan
    outcome = trainer.step([batch], learning_rate=1e-2, update=2, seeds=[1], control_values=[])
    assert outcome.skipped is not None
    for name, values in buffers(trainer).items():
        np.testing.assert_array_equal(values, before[name])


def test_a_resumed_run_has_the_same_bits(jobs: dict[str, Job], tmp_path: Path) -> None:
    job, store = jobs["sgd"], DirectoryStore(tmp_path)
    whole, first, second = (trainer_of(job) for _ in range(3))
    expected = [step(whole, job, number, 0.25) for number in range(1, 7)][-1]
    for number in range(1, 4):
        step(first, job, number, 0.25)
    leave(first, store, SoloCommunicator())
    take_up(second, store)
    for number in range(4, 7):
        found = step(second, job, number, 0.25)
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_stages_of_zero_and_other_ranks_have_the_same_average(jobs: dict[str, Job], tmp_path: Path) -> None:
    """Three ranks save under each stage; one rank reads their averages."""
    made = [
        Job(
            **{
                **vars(jobs[rule]),
                "name": f"{rule}.{stage}",
                "stage": stage,
                "saves": str(tmp_path / f"{rule}.{stage}"),
            }
        )
        for rule in ("adamw", "lamb")
        for stage in range(4)
    ]
    run_ranks(3, tmp_path / "ranks", made, SMALL="64")
    for job in made:
        found = saved_buffers(Path(job.saves))
        plain = saved_buffers(tmp_path / f"{job.name.partition('.')[0]}.0")
        assert not np.array_equal(found["average"], found["parameters"][: found["average"].size])
        np.testing.assert_allclose(found["average"], plain["average"], rtol=1e-5, atol=1e-6)
        trainer = trainer_of(jobs[job.name.partition(".")[0]])
        take_up(trainer, DirectoryStore(Path(job.saves)))
        np.testing.assert_array_equal(buffers(trainer)["average"], found["average"])


@pytest.mark.parametrize(
    ("average", "more", "expected"),
    [
        ({"name": "ema", "start": "soon"}, {}, "train.average.start: 'soon' is not a duration"),
        ({"name": "swa", "start": "1 step", "every": "0 steps"}, {}, "train.average.every: '0 steps' is not above 0"),
        (
            {"name": "ema"}, {"resources": {"gpus_per_rank": 1, "ranks_per_node": 2}, "parallel": {"zero": 1}},
            "train.average: is not supported under ZeRO on GPUs",
        ),
        (
            {"name": "ema"}, {"resources": {"gpus_per_rank": 1, "ranks_per_node": 2}, "parallel": {"pipeline": 2}},
            "train.average: is not supported in divided models on GPUs",
        ),
        (
            {"name": "ema"},
            {
                "resources": {"gpus_per_rank": 1},
                "train": {"offload": "optimizer", "optimizer": {"name": "adamw", "lr": 0.1}},
            },
            "train.average: is not supported with train.offload",
        ),
        ({"name": "ema"}, {"trainer": {"name": "linear"}, "model": None}, "train.average: is for the trainer graph"),
    ],
)  # fmt: skip
def test_averages_that_a_run_cannot_have_are_named(
    average: dict[str, Any], more: dict[str, Any], expected: str
) -> None:
    train = {"steps": 100, "optimizer": {"name": "sgd", "lr": 0.1}, "average": average, **more.get("train", {})}
    spec = spec_of(**{**more, "train": train})
    found = [f"{'.'.join(map(str, problem.path))}: {problem.what}" for problem in check(spec)]
    assert any(line.startswith(expected) for line in found), found
