"""Schedules of a pipeline: complete, free of deadlock, and as long and as large as the papers say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from ortflow.workflow.parallel.schedule import Action, Kind, schedule
from ortflow.workflow.parallel.timeline import bubble_by_formula, sources, timeline

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3), ("interleaved", 4)]
of_every_kind = pytest.mark.parametrize(("kind", "chunks"), KINDS)
SIZES = [*itertools.product(range(1, 9), range(1, 19))]
"""Ranks and micro-batches."""


def unit(action: Action, chunks: int) -> float:
    return (1.0 if action.direction == "forward" else 2.0) / chunks


@of_every_kind
def test_every_pass_runs_once_in_the_order_of_the_micro_batches(kind: Kind, chunks: int) -> None:
    for ranks, micro_batches in SIZES:
        for actions in schedule(kind, ranks, micro_batches, chunks):
            assert len(actions) == 2 * micro_batches * chunks == len(set(actions))
            for direction, chunk in itertools.product(("forward", "backward"), range(chunks)):
                numbers = [a.micro_batch for a in actions if (a.direction, a.chunk) == (direction, chunk)]
                assert numbers == list(range(micro_batches))


@of_every_kind
def test_no_action_waits_for_ever(kind: Kind, chunks: int) -> None:
    for ranks, micro_batches in SIZES:
        found = timeline(schedule(kind, ranks, micro_batches, chunks), lambda _, action: unit(action, chunks), 0.1)
        assert all(len(spans) == 2 * micro_batches * chunks for spans in found.spans)


@of_every_kind
def test_bubble_is_that_of_the_papers(kind: Kind, chunks: int) -> None:
    for ranks, micro_batches in SIZES:
        if chunks == 1 or micro_batches % ranks == 0:
            found = timeline(schedule(kind, ranks, micro_batches, chunks), lambda _, action: unit(action, chunks))
            assert found.bubble == pytest.approx(bubble_by_formula(ranks, micro_batches, chunks))


def kept_micro_batches(actions: Sequence[Action]) -> int:
    """The largest number of forward passes whose activations a rank keeps at one time, including the running one."""
    kept = most = 0
    for action in actions:
        kept += 1 if action.direction == "forward" else -1
        most = max(most, kept)
    return most


@of_every_kind
def test_activations_that_are_kept(kind: Kind, chunks: int) -> None:
    for ranks, micro_batches in SIZES:
        for rank, actions in enumerate(schedule(kind, ranks, micro_batches, chunks)):
            kept = kept_micro_batches(actions)
            if kind == "gpipe":
                assert kept == micro_batches
            elif chunks == 1:
                assert kept == min(ranks - rank, micro_batches)
            elif micro_batches % ranks == 0:
                # As in Megatron-LM; each is of a chunk, of which `chunks` make the layers of a rank.
                assert kept == min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1, micro_batches * chunks)


@of_every_kind
def test_each_link_receives_in_the_order_in_which_it_sends(kind: Kind, chunks: int) -> None:
    for ranks, micro_batches in SIZES:
        actions = schedule(kind, ranks, micro_batches, chunks)
        last = ranks * chunks - 1
        sent: dict[tuple[str, int], list[int]] = {}
        received: dict[tuple[str, int], list[int]] = {}
        for rank, each in enumerate(actions):
            for action in each:
                stage = action.stage(rank, ranks)
                for direction, source, number in sources(action, stage, last):
                    if source != stage:
                        received.setdefault((direction, source), []).append(number)
                if 0 <= stage + (1 if action.direction == "forward" else -1) <= last:
                    sent.setdefault((action.direction, stage), []).append(action.micro_batch)
        assert sent == received


def test_a_schedule_in_the_wrong_order_waits_for_ever() -> None:
    first, second = schedule("1f1b", 2, 2)
    assert second[1].direction == "backward"
    second[0], second[1] = second[1], second[0]
    with pytest.raises(ValueError, match="waits for ever"):
        timeline([first, second], lambda _, action: 1.0)


def test_only_interleaved_has_chunks() -> None:
    with pytest.raises(ValueError, match="one chunk"):
        schedule("1f1b", 2, 2, 2)


def test_1f1b_of_four_ranks() -> None:
    """Figure 4 of Narayanan et al. 2021: the third of four ranks."""
    found = [f"{action.direction[0]}{action.micro_batch}" for action in schedule("1f1b", 4, 4)[2]]
    assert found == ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]
