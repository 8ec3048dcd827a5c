"""The loss scale: its rule, its place in a checkpoint, and steps that overflow."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import pytest
import stage_models
from graph_build_models import built, run_file
from queued import Fake, halved, outcomes_of

from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.run.progress import Progress
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.loss_scale import LARGEST, PERIOD, SMALLEST, START, LossScale, loss_scale_of, unit_of


def through(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step: x overflows, a dot does not."""
    found = []
    for each in overflows:
        scale = scale.after(each == "x")
        found.append(scale.value)
    return found


def test_overflows_halve_it_down_to_one() -> None:
    assert through(LossScale(), "xx.x") == [32768, 16384, 16384, 8192]
    assert through(LossScale(4.0), "xxxxx") == [2, 1, 1, 1, 1]
    assert LossScale(2.0).can_fall
    assert not LossScale(SMALLEST).can_fall


def test_it_is_doubled_behind_so_many_good_steps_in_a_row() -> None:
    assert through(LossScale(), "." * (PERIOD - 1))[-1] == START
    assert through(LossScale(), "." * PERIOD)[-1] == 2 * START
    assert through(LossScale(), "." * (PERIOD - 1) + "x" + "." * (PERIOD - 1))[-1] == START / 2
    assert through(LossScale(), "." * (PERIOD - 1) + "x" + "." * PERIOD)[-1] == START
    assert through(LossScale(LARGEST), "." * PERIOD)[-1] == LARGEST


def test_a_scale_that_is_given_stays() -> None:
    given = loss_scale_of(1000)
    assert through(given, "x.x") == [1000] * 3
    assert not given.can_fall
    assert given.numbers() == {}
    assert given.restored({"loss_scale": 4.0}) == given


@pytest.mark.parametrize(
    ("shape", "elements", "count"),
    [
        ((None,), {}, 8), ((None, 16), {}, 8 * 16), ((None, None), {}, 8),
        ((None, None), {"labels": 8 * 16}, 8 * 16), ((None, None), {"labels": 0}, 8), ((None, 3), {"labels": 24}, 16),
    ],
)  # fmt: skip
def test_its_unit_is_one_over_the_labels_of_a_micro_batch(
    shape: tuple[int | None, ...], elements: dict[str, int], count: int
) -> None:
    inputs = [BatchInput("tokens", "int64", (None, 64), "data"), BatchInput("labels", "int64", shape, "label")]
    assert unit_of(inputs, 8, elements) == 1 / count
    assert unit_of(inputs[:1], 8, elements) == 1 / 8


def test_a_trainer_counts_the_labels_of_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their length is in the data, not in the graph; without it the first steps of a run overflowed."""
    model = stage_models.transformer(tmp_path / "model.onnx", layers=1)
    steps = [[MicroBatch(stage_models.batch_of("transformer", step, 8), 8)] for step in range(16)]
    units, overflows = [], []
    for lengths in ({}, {"tokens": 16, "labels": 16}):
        graphs = built(model, lengths=lengths)
        train = halved(onnx.load(graphs.train))
        trainer = Fake(monkeypatch).trainer(graphs, run_file(model, data__micro_batch=8), train=train)
        units.append(trainer.training.loop._work.loss_scale.factor.read()[0] / START)
        overflows.append(sum(outcome.overflow for outcome in outcomes_of(trainer, steps)))
    assert units == [1 / 8, 1 / 128]
    assert overflows[0] - overflows[1] >= 4


def test_a_checkpoint_brings_it_back_to_the_bit() -> None:
    scale = loss_scale_of("dynamic")
    for step in range(3 * PERIOD):
        if step % 701 == 0:
            progress = Progress(trainer=dict(scale.numbers()))
            kept = Progress.from_json(progress.to_json()).trainer
            assert LossScale().restored(kept) == scale
        scale = scale.after(step in (5, 6, PERIOD))


def test_a_checkpoint_without_one_starts_from_the_default() -> None:
    assert LossScale(4.0).restored(Progress.from_json({"step": 1, "updates": 1, "epoch": 0, "sample": 8}).trainer) == (
        LossScale(4.0)
    )


@pytest.mark.parametrize(
    "numbers",
    [
        {"loss_scale": 0.0},
        {"loss_scale": math.nan},
        {"loss_scale": math.inf},
        {"loss_scale": -2.0},
        {"loss_scale": 2.0**25},
        {"loss_scale": 2.0, "loss_scale_good_steps": -1},
        {"loss_scale": 2.0, "loss_scale_good_steps": 0.5},
        {"loss_scale": 2.0, "loss_scale_good_steps": PERIOD},
        {"loss_scale": 2.0, "loss_scale_good_steps": math.nan},
    ],
    ids=str,
)
def test_numbers_that_no_run_keeps_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="loss_scale"):
        LossScale().restored(numbers)


@pytest.mark.parametrize("kept", [[1.0], {"loss_scale": "2"}, {"loss_scale": True}, None], ids=str)
def test_a_manifest_with_other_than_numbers_is_refused(kept: object) -> None:
    record = {"step": 1, "updates": 1, "epoch": 0, "sample": 8, "trainer": kept}
    with pytest.raises(ValueError, match=r"progress\.trainer"):
        Progress.from_json(record)
