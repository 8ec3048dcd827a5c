"""The number of nodes of an elastic run: which fit, which is next, when a run waits, shrinks and grows."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_attempts import FakeAttempt, write_step
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from messages import alike, says
from run_files import spec_of
from views import Lines

from ortflow.launchers.attempts.cause import Cause
from ortflow.launchers.batch.elastic import AllocatedNodes, failed_growths
from ortflow.launchers.records import Outcome
from ortflow.launchers.stop import GROWTH, Stop, write_request
from ortflow.launchers.supervision.elastic import ElasticNodes, absent, described, grown, next_nodes
from ortflow.launchers.supervision.supervised import Job
from ortflow.launchers.supervision.supervisor import Supervisor
from ortflow.workflow.data.epoch_positions import Plan, Position
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.nodes import of_this_attempt, on_nodes, permitted, skipped_messages, variables
from ortflow.workflow.spec.run import TrainerRunSpec

FITTING = (1, 2, 4)
SHRINK, GROW = 60.0, 300.0
LOST = Cause(Outcome.LOST, EXIT_FAILURE, "n3 is lost")


def elastic(nodes: int = 4, least: int = 1, *, batch: int | None = 16, **sections: Any) -> TrainerRunSpec:
    """Of 4 samples in a micro-batch and one rank on each node."""
    train = {"steps": 100, "optimizer": {"name": "adamw", "lr": 0.001}, "global_batch": batch}
    resources = {"nodes": nodes, "min_nodes": least, **sections.pop("resources", {})}
    return spec_of(train=train, resources=resources, **sections)


@pytest.mark.parametrize(
    ("present", "waited", "expected"),
    [
        (4, 0.0, 4),
        (3, 0.0, None),
        (3, SHRINK - 0.1, None),
        (3, SHRINK, 2),
        (2, SHRINK, 2),
        (1, SHRINK, 1),
        (0, 1e9, None),
    ],
)
def test_the_nodes_of_the_next_attempt(present: int, waited: float, expected: int | None) -> None:
    assert next_nodes(present, FITTING, waited, SHRINK) == expected


def test_below_the_smallest_number_a_run_waits_for_ever() -> None:
    assert next_nodes(1, (2, 4), 1e9, SHRINK) is None


@pytest.mark.parametrize(
    ("running", "present", "expected"), [(1, 1, None), (1, 2, 2), (2, 3, None), (2, 4, 4), (4, 4, None), (1, 9, 4)]
)
def test_when_a_run_grows(running: int, present: int, expected: int | None) -> None:
    assert grown(running, present, FITTING) == expected


def test_words() -> None:
    assert described(4, 4, "ignored") == "all 4 nodes"
    assert says(described(2, 4, absent(["n3", "n4"], "lost")), "2 of 4 nodes: … n3 and n4 are lost")
    assert absent(["n3"], "lost") == "n3 is lost"
    assert absent(list("abcde"), "missing") == "a, b, c and 2 more are missing"


def test_numbers_that_do_not_divide_a_step_are_skipped() -> None:
    spec = elastic()
    assert permitted(spec) == (1, 2, 4)
    assert alike(skipped_messages(spec), ["3 nodes … 3 ranks x 4 samples (data.micro_batch) … 16 samples"])
    assert permitted(spec_of(resources={"nodes": 4})) == (4,)


def test_replicas_of_several_ranks() -> None:
    spec = elastic(batch=None, parallel={"pipeline": 2}, resources={"ranks_per_node": 1})
    assert permitted(spec) == (2, 4)
    assert says(skipped_messages(spec)[0], "1 node … 2 ranks of a replica … 1 ranks")


def test_the_ranks_of_an_attempt_get_its_number() -> None:
    spec = elastic(batch=None)
    small = of_this_attempt(spec, variables(on_nodes(spec, 2), "2 of 4 nodes"))
    assert (small.world_size, small.global_batch, small.accumulation) == (2, 16, 2)
    assert of_this_attempt(spec, {}).world_size == 4
    fixed = spec_of(resources={"nodes": 4})
    assert of_this_attempt(fixed, {"ORTFLOW_NODES": "2"}) == fixed, "a variable that is left over changes nothing"


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.integers(0, 20))
def test_a_step_takes_the_same_samples_on_any_number_of_nodes(
    nodes: int, ranks: int, accumulation: int, step: int
) -> None:
    sections = {"resources": {"ranks_per_node": ranks}}
    spec = elastic(nodes, batch=4 * nodes * ranks * accumulation, **sections)
    order, samples = SampleOrder(1000, seed=3), []
    for number in permitted(spec):
        small = on_nodes(spec, number)
        plan = Plan(1000, small.data.micro_batch, small.accumulation, small.replicas, "drop")
        position = Position()
        for _ in range(step):
            position = plan.step(position).next
        whole = plan.step(position)
        places = [
            place
            for micro_step in range(plan.accumulation)
            for rank in range(plan.world_size)
            for place in range(*plan.places(whole, micro_step, rank))
        ]
        indices = order.indices(whole.epoch, whole.start, whole.stop)
        samples.append([int(indices[place - whole.start]) for place in places])
        assert len(samples[-1]) == spec.global_batch
    assert all(np.array_equal(one, samples[0]) for one in samples), "in the same order, too"


# ---- the supervisor


class FakePool:
    """Nodes n1, n2, … of which some are away."""

    state = "lost"

    def __init__(self, count: int) -> None:
        self.names: Sequence[str] = [f"n{number}" for number in range(1, count + 1)]
        self.away: set[str] = set()

    def shown(self, name: str) -> str:
        return name

    def node(self, name: str) -> str:
        return name

    def present(self, among: Sequence[str]) -> list[str]:
        return [name for name in among if name not in self.away]


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Bench:
    """An elastic run of four nodes whose attempts follow `attempts`; each takes its first step after 5 seconds."""

    def __init__(self, root: Path, *attempts: dict[str, Any], **options: Any) -> None:
        self.run, self.clock, self.view, self.pool = RunDir(root), FakeClock(), Lines(), FakePool(4)
        restart = {"failures": 0, "hung_seconds": 1e6, "shrink_seconds": SHRINK, "grow_seconds": GROW}
        self.spec = elastic(restart={**restart, "backoff": {"first": 0.0}, **options})
        self.nodes = ElasticNodes(self.spec, self.pool, self.clock)
        self.planned, self.started = list(attempts), list[FakeAttempt]()

    def start(self, number: int) -> FakeAttempt:
        self.clock.after(5.0, lambda: write_step(self.run, number, number + 1))
        self.started.append(FakeAttempt(self.clock, number, **self.planned[number]))
        return self.started[-1]

    def supervise(self) -> int:
        job = Job(self.run, 4, self.spec.restart, self.start, lambda: None, nodes=self.nodes)
        return Supervisor(job, self.view, Stop(self.run.stop_request, clock=self.clock), self.clock).supervise()

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.run.read_attempts() if record["event"] == kind]

    def ranks(self) -> list[tuple[int, str]]:
        return [(record["world_size"], record["elastic"]) for record in self.records("start")]


def test_a_lost_node_shrinks_the_run_and_its_return_grows_it(tmp_path: Path) -> None:
    lost = {"code": EXIT_FAILURE, "seconds": 100.0, "reported": LOST}
    bench = Bench(tmp_path, lost, {"leaves_after": 4.0}, {"seconds": 50.0})
    bench.clock.after(100.0, lambda: bench.pool.away.add("n3"))
    bench.clock.after(100.0 + SHRINK + 20.0, bench.pool.away.clear)
    assert bench.supervise() == EXIT_DONE
    words = "2 of 4 nodes: … n3 is lost … 3 nodes"
    assert [ranks for ranks, _ in bench.ranks()] == [4, 2, 4]
    assert alike([nodes for _, nodes in bench.ranks()], ["all 4 nodes", words, "all 4 nodes"])
    first, second, third = bench.started
    assert second.started_at - first.started_at == pytest.approx(100.0 + SHRINK, abs=2.0)
    assert second.asked_at is not None
    assert second.asked_at - second.started_at == pytest.approx(5.0 + GROW, abs=2.0), "after its first step"
    assert third.started_at - second.asked_at == pytest.approx(4.0, abs=1.0)
    lost_end, grew, done = bench.records("end")
    assert (lost_end["outcome"], lost_end["next"]) == ("lost", "restart")
    assert (grew["outcome"], grew["counts"], grew["grows"], grew["asked"]) == ("preempted", False, True, None)
    assert says(grew["cause"], "… 4 of 4 nodes")
    assert done["outcome"] == "finished"
    assert not bench.run.stop_request.exists()
    assert any(says(line, "waiting for nodes … n3 is lost") for line in bench.view.said)
    assert any(says(line, f"{words} … 2 ranks … accumulation 2 … 16 samples") for line in bench.view.said)


def test_a_node_that_is_back_in_time_costs_only_the_wait(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 10.0})
    bench.pool.away = {"n1", "n2"}
    bench.clock.after(SHRINK / 2, bench.pool.away.clear)
    begun = bench.clock.now
    assert bench.supervise() == EXIT_DONE
    assert bench.ranks() == [(4, "all 4 nodes")]
    assert bench.started[0].started_at - begun == pytest.approx(SHRINK / 2, abs=1.0)


def test_a_run_without_nodes_waits_until_it_is_stopped(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {})
    bench.pool.away = set(bench.pool.names)
    bench.clock.after(4000.0, lambda: write_request(bench.run.stop_request, "cancel"))
    assert bench.supervise() == EXIT_PREEMPTED
    assert not bench.started
    (end,) = bench.records("stop")
    assert end["asked"] == "cancel"


def test_a_run_that_does_not_grow(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"seconds": 5000.0, "leaves_after": 1.0}, shrink_seconds=0.0, grow_seconds=1e6)
    bench.pool.away = {"n1", "n3"}
    bench.clock.after(10.0, bench.pool.away.clear)
    assert bench.supervise() == EXIT_DONE
    assert bench.started[0].asked_at is None
    assert bench.nodes.names == ["n2", "n4"]


def test_growing_has_no_deadline_and_leaves_no_request_behind(tmp_path: Path) -> None:
    """The ranks fail while they save: the next ones must not find the request."""
    seen: list[bool] = []
    bench = Bench(tmp_path, {"code": 1, "seconds": 1000.0}, {"seconds": 50.0}, failures=1, shrink_seconds=0.0)
    bench.pool.away = {"n3"}
    bench.clock.after(10.0, bench.pool.away.clear)
    whole = bench.start

    def start(number: int) -> FakeAttempt:
        seen.append(bench.run.stop_request.exists())
        return whole(number)

    bench.start = start  # type: ignore[method-assign]
    assert bench.supervise() == EXIT_DONE
    assert bench.started[0].asked_at is not None
    assert bench.records("end")[0]["outcome"] == "failure", "not killed after the grace period of a preemption"
    assert seen == [False, False]


def test_a_cancel_while_a_run_grows_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {"leaves_after": 20.0}, shrink_seconds=0.0)
    bench.pool.away = {"n3"}
    bench.clock.after(10.0, bench.pool.away.clear)
    bench.clock.after(5.0 + GROW + 8.0, lambda: write_request(bench.run.stop_request, "cancel"))
    assert bench.supervise() == EXIT_PREEMPTED
    (end,) = bench.records("end")
    assert (end["asked"], end["next"]) == ("cancel", "stop")


def test_ranks_that_leave_for_growth_are_no_request_to_the_launcher(tmp_path: Path) -> None:
    stop = Stop(tmp_path / ".stop", clock=FakeClock())
    write_request(tmp_path / ".stop", GROWTH)
    assert stop.check(fresh=True) is None


# ---- a batch job


class FakeJob:
    """The job of a scheduler that has given `given` nodes and has `free` others."""

    scheduler = "Slurm"

    def __init__(self, given: int, free: int = 0) -> None:
        self.given, self.free, self.questions = given, free, list[int]()

    def nodes(self) -> list[str]:
        return [f"n{number}" for number in range(1, self.given + 1)]

    def more_nodes(self, count: int, script: Path, ours: Sequence[str]) -> bool:
        assert list(ours) == self.nodes()
        self.questions.append(count)
        return count <= self.free

    def lost_nodes(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name == "n4"]


def allocated(
    given: int, *records: dict[str, Any], job: FakeJob | None = None, clock: FakeClock | None = None
) -> AllocatedNodes:
    spec = elastic(restart={"grow_seconds": 30.0})
    return AllocatedNodes(spec, job or FakeJob(given, 0), Path("job.sh"), records, clock or FakeClock())  # type: ignore[arg-type]


def never() -> None:
    return None


@pytest.mark.parametrize(
    ("given", "before", "words"),
    [
        (4, ["n1", "n2", "n3", "n4"], "all 4 nodes"),
        (3, ["n1", "n2", "n3", "n4"], "2 of 4 nodes: … n4 is lost … 3 nodes"),
        (2, [], "2 of 4 nodes: … 2 nodes"),
        (1, ["n1", "n2"], "1 of 4 nodes: … 1 node"),
    ],
)
def test_the_nodes_of_a_job(given: int, before: list[str], words: str) -> None:
    nodes = allocated(given, {"event": "start", "nodes": len(before), "on": before})
    chosen = nodes.choose(Lines(), never)
    assert chosen is not None
    assert says(chosen.summary, words)
    assert chosen.world_size == chosen.nodes == nodes.spec.world_size


def test_a_job_with_too_few_nodes() -> None:
    with pytest.raises(UserError, match=r"0 nodes.*needs 1"):
        allocated(0)


def test_a_job_asks_for_the_largest_number_that_is_free() -> None:
    clock = FakeClock()
    job = FakeJob(1, 1)
    nodes = allocated(1, job=job, clock=clock)
    assert nodes.growing(29.0) is None
    assert not job.questions, "not before the period is over"
    assert says(nodes.growing(30.0), "2 of 4 nodes …")
    assert job.questions == [3, 1]
    assert nodes.growing(31.0) is None
    assert job.questions == [3, 1], "a scheduler is not asked all the time"
    clock.sleep(60.0)
    job.free = 0
    assert nodes.growing(90.0) is None


START: Callable[[int], dict[str, Any]] = lambda nodes: {"event": "start", "nodes": nodes}  # noqa: E731
GREW: dict[str, Any] = {"event": "end", "grows": True}
FAILED: dict[str, Any] = {"event": "end"}


@pytest.mark.parametrize(
    ("records", "nodes", "expected"),
    [
        ([], 2, 0),
        ([START(2), GREW], 4, 0),
        ([START(2), GREW], 2, 1),
        ([START(2), GREW, START(2), GREW], 2, 2),
        ([START(2), GREW, START(2), FAILED], 2, 0),
        ([START(1), GREW, START(2), GREW], 2, 1),
    ],
)
def test_growth_without_more_nodes(records: list[dict[str, Any]], nodes: int, expected: int) -> None:
    assert failed_growths(records, nodes) == expected


def test_after_growth_without_more_nodes_a_job_keeps_its_nodes_for_longer() -> None:
    nodes = allocated(2, START(2), GREW, job=FakeJob(2, 2))
    assert nodes.growing(59.0) is None
    assert nodes.growing(60.0) is not None
