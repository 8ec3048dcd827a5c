"""Predictions of layouts: which there are, what ranks hold and for how long, and what schedules and links add."""

from __future__ import annotations

from typing import Any

import pytest
from run_files import SMALL, spec_of

from ortflow.cli.plan import without_data_parallelism
from ortflow.workflow.graph.ir.collective import Kind
from ortflow.workflow.graph.memory.peak_memory import Event
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.parallel.division import Division, Holding
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.parallel.region import Region
from ortflow.workflow.parallel.schedule import schedule
from ortflow.workflow.parallel.stage import Cost
from ortflow.workflow.parallel.timeline import bubble_by_formula
from ortflow.workflow.planning import holdings
from ortflow.workflow.planning.budget import budget_of, may_measure
from ortflow.workflow.planning.holdings import state_of
from ortflow.workflow.planning.layout import Layout, layouts, on_ranks, refusal, section, under
from ortflow.workflow.planning.passes import StagePasses, Work, weighted
from ortflow.workflow.planning.rates import Link, Rates, assumed
from ortflow.workflow.planning.replay import ChunkMemory, replay
from ortflow.workflow.planning.seconds import step_time
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.system import host_memory

MB = 1 << 20
FREE = Rates(1e9, 0.0, Link(float("inf"), 0.0), Link(float("inf"), 0.0))
"""Ranks of a billion operations a second that exchange in no time."""


def run_of(ranks: int, micro_batches: int = 1, **parallel: Any) -> TrainerRunSpec:
    return spec_of(
        train={"steps": 5, "optimizer": {"name": "adamw", "lr": 1e-3}, "gradient_accumulation": micro_batches},
        resources={"ranks_per_node": ranks}, parallel=parallel,
    )  # fmt: skip


def test_a_container_has_the_memory_of_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total", lambda: 1 << 30)
    monkeypatch.setattr(host_memory, "available", lambda: 1 << 29)
    assert budget_of(run_of(4), None).bytes == 1 << 28
    assert may_measure(None, run_of(1), FREE, 0, 1 << 29)
    assert not may_measure(None, run_of(1), FREE, 0, (1 << 29) + 1)


def test_every_product_of_degrees_is_a_layout() -> None:
    found = list(layouts(8, chunks=(2,)))
    assert len(found) == len(set(found))
    assert all(each.grid.world_size == 8 for each in found)
    grids = {(each.data, each.pipeline, each.horizontal) for each in found}
    assert len(grids) == 10, "three factors whose product is 8"
    assert {each.zero for each in found if each.data == 1} == {0}
    assert {each.zero for each in found if each.data == 8} == {0, 1, 2, 3}
    kinds = {(each.schedule, each.chunks) for each in found if each.pipeline == 4 and each.zero == 0}
    assert kinds == {("1f1b", 1), ("gpipe", 1), ("interleaved", 2)}
    assert list(layouts(1)) == [Layout(1)]


def test_a_layout_keeps_the_samples_of_a_step_and_other_keys() -> None:
    spec = run_of(8, cuts=None)
    assert spec.global_batch == 32
    piped = under(spec, Layout(2, 2, 2, 1, "interleaved", 2))
    assert (piped.global_batch, piped.accumulation, piped.replicas) == (32, 4, 2)
    assert refusal(piped) is None
    assert section(Layout(2, 2, 2, 1, "interleaved", 2), spec) == {
        "data": 2, "pipeline": 2, "schedule": "interleaved", "chunks": 2, "horizontal": 2, "zero": 1,
    }  # fmt: skip
    cut = run_of(8, pipeline=2, cuts=[["a"]])
    assert section(Layout(4, 2), cut)["cuts"] == [["a"]]
    assert "cuts" not in section(Layout(2, 4), cut)
    named = run_of(8, horizontal=2, whole=["head.*"])
    assert section(Layout(4, 1, 2), named) == {"data": 4, "horizontal": 2, "whole": ["head.*"]}
    assert section(Layout(4, 2), named) == {"data": 4, "pipeline": 2, "schedule": "1f1b"}
    assert refusal(under(named, Layout(4, 2))) is None
    four = on_ranks(spec, 4)
    assert (four.world_size, four.global_batch, four.accumulation) == (4, 32, 2)
    nodes = spec.model_copy(update={"resources": spec.resources.model_copy(update={"nodes": 2})})
    assert [(on_ranks(nodes, n).resources.nodes, on_ranks(nodes, n).world_size) for n in (6, 5)] == [(2, 6), (1, 5)]


def test_what_validate_refuses_is_refused_with_its_reason() -> None:
    spec = run_of(4)
    assert "adds up the gradients" in str(refusal(under(spec, Layout(2, 2, zero=2))))
    assert "shards whole layers" in str(refusal(under(spec, Layout(2, 1, 2, 3))))
    three = on_ranks(run_of(4), 3)
    assert "do not divide" in str(refusal(under(three, Layout(3))))


def chunk(both: bool = False, **sizes: int) -> ChunkMemory:
    """A stage whose forward pass leaves 8 MB, and whose backward pass needs 2 MB for a moment."""
    one = [Event("saved", 8 * MB, "n"), Event("t", MB, "n"), Event("t", MB, "n", freed=True)]
    back = [Event("g", 2 * MB, "m"), Event("g", 2 * MB, "m", freed=True)]
    whole = [*one, *back, Event("saved", 8 * MB, "m", freed=True)] if both else None
    given = {"arriving": 0, "stash": 0, "gradients_in": 0, "gradients_out": 0, **sizes}
    return ChunkMemory(one, back, whole, **given)


def test_schedules_keep_the_activations_of_as_many_micro_batches() -> None:
    alive = {
        kind: [replay(actions, [chunk()]).peak.size // MB for actions in schedule(kind, 4, 8)]
        for kind in ("gpipe", "1f1b")
    }
    assert alive["gpipe"] == [8 * 8 + 2] * 4
    assert alive["1f1b"] == [8 * kept + 2 for kept in (4, 3, 2, 1)]
    last = schedule("1f1b", 4, 8)[3]
    assert replay(last, [chunk(both=True)]).peak.size == 10 * MB, "8 and 2, as one graph"
    held = replay(schedule("1f1b", 4, 8)[0], [chunk()]).peak
    assert held.held >= held.size
    assert held.values[0] == ("4 micro-batches between their passes", 32 * MB)


def test_messages_are_counted_while_they_are_needed() -> None:
    """2 micro-batches are kept at a time, and the next 2 messages are being received."""
    actions = schedule("1f1b", 3, 8)[1]
    given = {"arriving": 10, "stash": 10, "gradients_in": 3, "gradients_out": 5}
    assert replay(actions, [chunk(**given)]).messages == 2 * 10 + (10 + 3) + 3 + 2 * 5
    assert replay(actions, [chunk(arriving=10)]).messages == 10 + 2 * 10, "nothing of them is read again"


def two_stages(horizontal: int = 1, data: int = 1) -> tuple[FlatIndex, Division]:
    """A matrix on each stage, divided over the parts; a table that both hold."""
    tensors = [Tensor(name, (64, 64), "decay") for name in ("first", "table", "second")]
    tensors.append(Tensor("mean", (64,), "state"))
    whole = FlatIndex.place(tensors)
    held = []
    for names in (("first", "table", "mean"), ("second", "table")):
        for part in range(horizontal):
            step = 64 // horizontal
            regions = {n: Region(0, ((part * step, part * step + step),)) for n in names if n in ("first", "second")}
            regions = regions if horizontal > 1 else {}
            mine = [
                Tensor(t.name, regions[t.name].shape(t.shape) if t.name in regions else t.shape, t.group)
                for t in tensors if t.name in names
            ]  # fmt: skip
            held.append(Holding(FlatIndex.place(mine), regions))
    return whole, Division(whole, Grid(data, 2, horizontal), tuple(held))


def test_a_gpus_state_is_copied_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "KEPT", 1000)
    whole, division = two_stages(horizontal=2, data=2)
    spec, alone = run_of(8, micro_batches=2, pipeline=2, horizontal=2), run_of(1)
    shares, state = 4 * (1600 + 2 * 1536), 4 * (whole.size + 2 * whole.trained)
    assert state_of(spec, whole, division, 0)["checkpoint"] == shares + 1000
    assert state_of(alone, whole)["checkpoint"] == 1000
    gpus = {"resources": spec.resources.model_copy(update={"gpus_per_rank": 1})}
    assert state_of(spec.model_copy(update=gpus), whole, division, 0)["checkpoint"] == 2 * shares
    gpus = {"resources": alone.resources.model_copy(update={"gpus_per_rank": 1})}
    assert state_of(alone.model_copy(update=gpus), whole)["checkpoint"] == state


def test_bytes_that_a_rank_holds() -> None:
    whole, division = two_stages(horizontal=2, data=2)
    spec = run_of(8, micro_batches=2, pipeline=2, horizontal=2)
    first = state_of(spec, whole, division, 0)
    trained = 64 * 64 // 2 + 64 * 64
    assert first["parameters"] == 4 * (trained + 64)
    assert first["gradients"] == 4 * 2 * trained + 4 * 2 * 64, "accumulated, and running statistics twice"
    assert first["moments"] == 2 * 4 * trained
    shares = 4 * (1600 + 2 * 1536)
    assert first["checkpoint"] == 2 * shares, "an eighth of the state, rounded up to 64, and the copy of it"
    zero = state_of(under(spec, Layout(2, 2, 2, 1)), whole, division, 0)
    assert zero["moments"] == first["moments"] // 2
    assert state_of(spec, whole, division, 7)["parameters"] == 4 * trained
    assert state_of(run_of(2), whole)["parameters"] == 4 * (3 * 64 * 64 + 64)


def stage(forward: int = 10**8, backward: int = 2 * 10**8, sent: int = 0) -> StagePasses:
    return StagePasses(chunk(), Work(forward), Work(backward), sent)


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_bubble_of_equal_stages_is_the_formulas(kind: Any, chunks: int) -> None:
    whole, division = two_stages()
    spec = under(run_of(2, micro_batches=4), Layout(1, 2, 1, 0, kind, chunks))
    time = step_time(spec, FREE, whole, [stage(10**8 // chunks, 2 * 10**8 // chunks)] * 2 * chunks, division)
    assert spec.accumulation == 8
    assert time.bubble == pytest.approx(bubble_by_formula(2, 8, chunks))
    assert time.bubble == pytest.approx(time.formula)
    assert time.total == pytest.approx(8 * 0.3 / (1 - time.formula))


def test_unequal_stages_and_messages_take_longer() -> None:
    whole, division = two_stages()
    spec = under(run_of(2, micro_batches=4), Layout(1, 2))
    equal = step_time(spec, FREE, whole, [stage()] * 2, division)
    unequal = step_time(spec, FREE, whole, [stage(5 * 10**7, 10**8), stage(15 * 10**7, 3 * 10**8)], division)
    assert unequal.passes > 1.3 * equal.passes
    slow = Rates(1e9, 0.0, Link(1e6, 0.0), Link(1e6, 0.0))
    sent = step_time(spec, slow, whole, [stage(sent=10**5)] * 2, division)
    assert sent.passes > equal.passes + 0.1
    assert sent.gradients > 0, "of the table that both stages hold"


def test_measured_stages_take_their_share_of_the_operations() -> None:
    """The second counts three times as much as the first, and took as long."""
    stages = [stage(100, 200, sent=8), stage(300, 600)]
    costs = [Cost(100, 0.5, 8), Cost(300, 0.5, 0)]
    found = weighted(stages, costs)
    assert [(each.forward.operations, each.backward.operations) for each in found] == [(200, 400), (200, 400)]
    assert found[0].sent == 8
    for unknown in ([Cost(100, None, 8), Cost(300, 0.5, 0)], [None, None], [Cost(100, 0.0, 8), Cost(300, 0.0, 0)]):
        assert weighted(stages, unknown) == stages


def test_replicas_and_zero_exchange_what_they_must() -> None:
    whole, _ = two_stages()
    link = Link(1e6, 0.0)
    rates, size = Rates(1e9, 1e-6, link, link), whole.trained * 4
    times = {z: step_time(under(run_of(4, 2), Layout(4, zero=z)), rates, whole, Work(10**8)) for z in (0, 1, 2, 3)}
    share = 3 / 4 * size / 1e6
    assert times[0].gradients == times[1].gradients == pytest.approx(2 * share)
    assert times[2].gradients == pytest.approx(3 * share), "a reduce-scatter for each micro-batch, and the gather"
    assert times[3].gradients == pytest.approx(2 * 3 * share), "fetched twice and reduced, for each micro-batch"
    spec = under(run_of(4, 2), Layout(4, zero=3))
    train = spec.train.model_copy(update={"precision": "bf16"})
    gpus = spec.resources.model_copy(update={"gpus_per_rank": 1})
    half = step_time(spec.model_copy(update={"train": train, "resources": gpus}), rates, whole, Work(10**8))
    assert half.gradients == pytest.approx(2 * 2 * share), "on GPUs it is fetched in 16 bits"
    assert times[1].update == pytest.approx(times[0].update / 4)
    assert all(time.passes == pytest.approx(0.2) for time in times.values())


def test_sums_within_layers_and_slow_networks_count() -> None:
    whole, _ = two_stages()
    division = Division(whole, Grid(1, 1, 2), (Holding(whole), Holding(whole)))
    spec = under(run_of(2), Layout(1, 1, 2))
    rates = Rates(1e9, 0.0, Link(1e6, 1e-3), Link(1e3, 1.0))
    work = Work(10**8, ((Kind.ALL_REDUCE, 1000), (Kind.ALL_GATHER, 1000), (Kind.REDUCE_SCATTER, 1000)))
    sums = (1e-3 + 2e-3) + (1e-3 + 1e-3) + (0.5e-3 + 1e-3)
    assert step_time(spec, rates, whole, work, division).passes == pytest.approx(2 * (0.1 + sums))
    apart = spec.model_copy(update={"resources": spec.resources.model_copy(update={"nodes": 2, "ranks_per_node": 1})})
    assert step_time(apart, rates, whole, work, division).passes > 2 * 5


def test_what_is_measured_unasked() -> None:
    spec, rates = run_of(1), assumed(1, gpu=False)
    assert may_measure(None, spec, rates, 10**9, MB)
    assert not may_measure(None, spec, rates, 10**13, MB), "minutes"
    assert may_measure(True, spec, rates, 10**13, MB)
    assert not may_measure(None, spec, rates, 10**9, 1 << 60), "more memory than there is"
    assert not may_measure(False, spec, rates, 10**9, MB)
    with pytest.raises(Exception, match="are free here"):
        may_measure(True, spec, rates, 10**9, 1 << 60)


@pytest.mark.parametrize(
    ("batch", "accumulation", "ranks", "wanted"),
    [
        (4, 1, 2, "data.micro_batch: 2, or train.global_batch: 8"),
        (3, 1, 2, ". train.global_batch: 6"),
        (4, 2, 2, None),
        (4, 1, 1, None),
    ],
)
def test_what_data_parallelism_needs(batch: int, accumulation: int, ranks: int, wanted: str | None) -> None:
    spec = load_run_text(SMALL, "run.yaml")
    train = spec.train.model_copy(update={"gradient_accumulation": accumulation, "global_batch": None})
    data = spec.data.model_copy(update={"micro_batch": batch})
    lines = [*without_data_parallelism(on_ranks(spec.model_copy(update={"train": train, "data": data}), ranks))]
    assert len(lines) == (wanted is not None)
    assert wanted is None or wanted in lines[0]
