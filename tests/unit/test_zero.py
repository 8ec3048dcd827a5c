"""ZeRO on real ranks: sharding keeps the curve, takes its share of memory, and works with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import mentions
from project import FEW_CORES, MPICH_SUMS
from queued import network
from sharing_ranks import SAMPLES, Array, Job, Outcome, graphs_of, perceptron, run_ranks, tower, train

from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex, share
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.optimizers import OPTIMIZERS
from ortflow.workflow.trainer.buffers import TAIL
from ortflow.workflow.trainer.opening import open_trainer

pytestmark = pytest.mark.rotates

RANKS = (1, 2, 3, 4)
DECAY = {"lr": 1e-2, "weight_decay": 0.1}
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", **DECAY},
    "adam": {"name": "adam", **DECAY},
    "lamb": {"name": "lamb", **DECAY},
    "sgd": {"name": "sgd", **DECAY},
    "nesterov": {"name": "sgd", "momentum": 0.9, "nesterov": True, **DECAY},
    "lion": {"name": "lion", **DECAY},
    "rmsprop": {"name": "rmsprop", "momentum": 0.9, "centered": True, "epsilon": 0.1, **DECAY},
    "adagrad": {"name": "adagrad", **DECAY},
    "nadam": {"name": "nadam", **DECAY},
    "radam": {"name": "radam", **DECAY},
}
CLIPPED = ("adamw", "adam", "lamb", "sgd", "nesterov")
"""Trained with clipped gradients as well, which no rule treats in its own way."""
FROZEN = {"model__parameters": {"freeze": ["first"]}}
CLIP = 0.1
"""Below the norm of every step."""
STAGES = (0, 1, 2, 3)
SMALL = "64"
"""Elements of a layer: the small networks have several."""


def changes_of(rule: str, *, clip: bool, kernels: str = "auto", **more: Any) -> dict[str, Any]:
    """As keys of a run file."""
    clipping = {"train__clip_norm": CLIP if clip else None}
    return {"train__optimizer": RULES[rule], "resources__kernels": kernels, **clipping, **more}


class Bench:
    """Jobs with graphs of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, Job] = {}

    def add(self, name: str, changes: dict[str, Any], make: Any = perceptron, **more: Any) -> None:
        home = self.folder / name
        home.mkdir()
        self.jobs[name] = Job(name, graphs_of(make(home / "model.onnx"), **changes), changes, **more)

    def under_all_stages(self) -> list[Job]:
        return [
            Job(**{**vars(job), "name": f"{name}.{stage}", "stage": stage})
            for name, job in self.jobs.items() for stage in (0, *shared(job))
        ]  # fmt: skip


def shared(job: Job) -> tuple[int, ...]:
    """Stages of ZeRO to test: without accumulation, the second equals the first. The third needs our kernels."""
    second = (2,) if job.micro_batches > 1 or job.name == "adamw" else ()
    return (1, *second, *(() if job.changes["resources__kernels"] == "onnxruntime" else (3,)))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(tmp_path_factory.mktemp("zero"))
    whole = {name for name, known in OPTIMIZERS.items() if not known.shapes}
    assert {rule["name"] for rule in RULES.values()} == whole, "every optimizer that pieces fit"
    for rule in RULES:
        bench.add(rule, changes_of(rule, clip=False))
        if rule in CLIPPED:
            bench.add(f"{rule}-clipped", changes_of(rule, clip=True, **FROZEN), micro_batches=2)
    bench.add("plain", changes_of("adamw", clip=True, kernels="onnxruntime"), micro_batches=2)
    # Not Adam: before a BatchNormalization a bias's gradient is only rounding, which Adam would amplify.
    bench.add("statistics", changes_of("nesterov", clip=True), network, micro_batches=2)
    uneven = {"damaged": [0, 3], "short": [1, 4]}
    bench.add("uneven", changes_of("nesterov", clip=True), network, micro_batches=2, **uneven)
    bench.add("damaged", changes_of("lamb", clip=True), damaged=[1, 2])
    return bench


@pytest.fixture(scope="module", params=RANKS)
def found(
    request: pytest.FixtureRequest, bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Outcome]]:
    """Results of each rank of a world for each job and stage; a reduce-scatter is done in several pieces."""
    settings = FEW_CORES if request.param > 2 else MPICH_SUMS
    folder = tmp_path_factory.mktemp("world")
    return run_ranks(request.param, folder, bench.under_all_stages(), PIECE="100", SMALL=SMALL, **settings)


@pytest.fixture(scope="module")
def alone(bench: Bench) -> dict[str, Outcome]:
    """Each job on one rank without ZeRO, in one micro-batch of all samples."""
    return {
        name: train(Job(**{**vars(job), "micro_batches": 1}), SoloCommunicator()) for name, job in bench.jobs.items()
    }


def moments_of(ranks: list[dict[str, Outcome]], job: str) -> dict[str, Array]:
    """The whole, assembled from all ranks' parts."""
    names = [name for name in ranks[0][job].state if name != "parameters"]
    return {name: np.concatenate([rank[job].state[name] for rank in ranks]) for name in names}


def parameters_of(ranks: list[dict[str, Outcome]], job: str) -> Array:
    """All of them; under stage 3 assembled from all ranks' parts."""
    parts = [rank[job].state["parameters"] for rank in ranks]
    return np.concatenate(parts) if ranks[0][job].sharded else parts[0]


def close(found: Array, expected: Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_curve_is_that_without_zero(bench: Bench, found: list[dict[str, Outcome]]) -> None:
    for name, job in bench.jobs.items():
        plain = found[0][f"{name}.0"]
        assert plain.skipped == job.damaged
        assert np.isfinite(plain.curve[[step for step in range(job.steps) if step not in job.damaged]]).all()
        for stage in shared(job):
            for rank in found:
                outcome = rank[f"{name}.{stage}"]
                assert outcome.skipped == job.damaged, (name, stage)
                close(outcome.curve, plain.curve)
                if stage < 3:
                    assert np.array_equal(outcome.state["parameters"], found[0][f"{name}.{stage}"].state["parameters"])
            close(parameters_of(found, f"{name}.{stage}"), plain.state["parameters"])
            for moment, values in moments_of(found, f"{name}.{stage}").items():
                close(values, plain.state[moment])


def test_the_curve_is_that_of_one_rank(
    bench: Bench, found: list[dict[str, Outcome]], alone: dict[str, Outcome]
) -> None:
    for name, job in bench.jobs.items():
        if job.short or name == "statistics":
            continue  # other samples, and statistics of other batches
        for stage in shared(job):
            outcome = found[0][f"{name}.{stage}"]
            close(outcome.curve, alone[name].curve)
            close(parameters_of(found, f"{name}.{stage}"), alone[name].state["parameters"])
            for moment, values in moments_of(found, f"{name}.{stage}").items():
                close(values, alone[name].state[moment])


def test_where_sums_are_the_same_so_is_every_bit(bench: Bench, found: list[dict[str, Outcome]]) -> None:
    """The sum of two numbers is unique; with clipping, squares are added in another order."""
    if len(found) > 2:
        pytest.skip("MPI may add up more than two in another order")
    for rule in sorted(RULES.keys() - {"lamb"}):
        plain = found[0][f"{rule}.0"]
        for stage in shared(bench.jobs[rule]):
            outcome = found[0][f"{rule}.{stage}"]
            assert np.array_equal(outcome.curve[:, 0], plain.curve[:, 0]), rule
            assert np.array_equal(parameters_of(found, f"{rule}.{stage}"), plain.state["parameters"]), rule


def test_frozen_parameters_stay(bench: Bench, found: list[dict[str, Outcome]]) -> None:
    entry = GraphSet.load(Path(bench.jobs["lamb-clipped"].graphs)).index["first"]
    assert entry.tensor.group == "frozen"
    begun = train(Job(**{**vars(bench.jobs["lamb-clipped"]), "steps": 0}), SoloCommunicator())
    for stage in (1, 2, 3):
        there = parameters_of(found, f"lamb-clipped.{stage}")
        assert np.array_equal(there[entry.offset : entry.end], begun.state["parameters"][entry.offset : entry.end])
        assert not np.array_equal(there, begun.state["parameters"])


def test_a_rank_keeps_the_moments_of_its_share_alone(bench: Bench, found: list[dict[str, Outcome]]) -> None:
    for name, job in bench.jobs.items():
        trained = GraphSet.load(Path(job.graphs)).index.trained
        for stage in (0, *shared(job)):
            for number, rank in enumerate(found):
                start, stop = share(trained, number, len(found)) if stage else (0, trained)
                outcome = rank[f"{name}.{stage}"]
                held = {moment: part for moment, part in outcome.state.items() if moment != "parameters"}
                assert all(part.size == stop - start for part in held.values())
                assert all(outcome.starts[moment] == start for moment in held)
                assert outcome.memory["moments"] == 4 * len(held) * (stop - start)
                accumulated = {0: trained, 1: trained, 2: stop - start}.get(stage, 0) if job.micro_batches > 1 else 0
                one = stop - start if stage == 3 else trained
                assert outcome.memory["gradients"] == 4 * (one + accumulated)
                if stage == 3:
                    held_here(outcome, GraphSet.load(Path(job.graphs)).index, number, len(found))
    if len(found) == 3:
        trained, line = GraphSet.load(Path(bench.jobs["adamw"].graphs)).index.trained, found[0]["adamw.1"].notes[-1]
        assert mentions(line, f"2 moments x 4 bytes x {trained} … 3 ranks = {8 * trained // 3} bytes")
        assert f"{8 * share(trained, 0, 3)[1]} allocated" in line


def held_here(outcome: Outcome, index: FlatIndex, rank: int, ranks: int) -> None:
    """The share of what is trained and the whole of the rest; a second share for checkpoints if there is a rest."""
    (start, stop), (first, last) = share(index.trained, rank, ranks), share(index.size, rank, ranks)
    rest = index.size - index.trained
    assert outcome.memory["parameters"] == 4 * (stop - start + rest + (last - first if rest else 0))
    assert outcome.state["parameters"].size == last - first
    assert outcome.memory["messages"] > 0
    states = index.size - index.span("decay", "no_decay", "frozen")[1] if rest else 0
    assert outcome.largest <= max(stop - start, rest, last - first, states + TAIL), "a buffer of everything"


def test_tensors_of_the_model_cross_the_edges_of_shares(bench: Bench) -> None:
    """Otherwise the trust ratios of LAMB would be right by chance."""
    index = GraphSet.load(Path(bench.jobs["lamb"].graphs)).index
    for ranks in RANKS[1:]:
        edges = [share(index.trained, rank, ranks)[1] for rank in range(ranks - 1)]
        assert any(entry.offset < edge < entry.end for edge in edges for entry in index), ranks
    assert SAMPLES % 12 == 0


def saved(folder: Path) -> dict[str, Array]:
    """Whole flat buffers of a checkpoint."""
    return dict(load(DirectoryStore(folder), 1).buffers)


CHAINS = ("adamw", "adamw-clipped", "statistics")
"""A model that is trained as a whole, one with a frozen parameter, and one with running statistics."""


@pytest.fixture(scope="module", params=CHAINS)
def hops(
    request: pytest.FixtureRequest, bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[Job], list[dict[str, Outcome]]]]:
    """Checkpoints saved by 3 ranks under each stage, loaded by 2, 4 and 1 under the next, and saved again."""
    folder, found = tmp_path_factory.mktemp("hops"), []
    job = bench.jobs[request.param]
    jobs = [Job(**{**vars(job), "name": f"{job.name}.{stage}", "stage": stage}) for stage in STAGES]
    for hop, count in enumerate((3, 2, 4, 1)):
        for place, job in enumerate(jobs):
            changes = {"saves": str(folder / f"{job.name}-{count}"), "resumes": job.saves}
            if hop:
                changes.update(steps=0, stage=(job.stage + hop) % len(STAGES))
            jobs[place] = Job(**{**vars(job), **changes})
        found.append(([*jobs], run_ranks(count, folder / str(count), jobs, SMALL=SMALL)))
    return found


def test_checkpoints_fit_every_stage_and_number_of_ranks(
    hops: list[tuple[list[Job], list[dict[str, Outcome]]]],
) -> None:
    """The same bits after each hop."""
    contents: dict[str, dict[str, Array]] = {}
    for jobs, ranks in hops:
        assert sorted(job.stage for job in jobs) == [*STAGES]
        for job in jobs:
            there = saved(Path(job.saves))
            assert np.array_equal(there["parameters"], parameters_of(ranks, job.name))
            whole = moments_of(ranks if job.stage else ranks[:1], job.name)
            assert all(np.array_equal(there[moment], values) and values.any() for moment, values in whole.items())
            assert there.keys() == {"parameters", *whole}
            expected = contents.setdefault(job.name, there)
            assert all(np.array_equal(there[name], values) for name, values in expected.items()), (len(ranks), job)
        sizes = {tuple(sorted(path.stat().st_size for path in Path(job.saves).rglob("rank-*"))) for job in jobs}
        assert len(sizes) == 1, "a checkpoint does not depend on the stage"


def test_a_machine_without_our_kernels_refuses_stage_3_in_one_sentence(bench: Bench) -> None:
    job = Job(**{**vars(bench.jobs["adamw"]), "stage": 3})
    sessions = Sessions(CpuDevice(), 1, "error")
    with pytest.raises(UserError, match=r"parallel\.zero.*3.*kernels"):
        open_trainer(GraphSet.load(Path(job.graphs)), job.spec(1), sessions, SoloCommunicator())


def test_a_process_holds_less(tmp_path: Path) -> None:
    """Eight layers of 1 M parameters on two ranks: 4 x 32 MiB of state without ZeRO, and half of it."""
    changes, state = changes_of("adamw", clip=False), 4 * 4 * 8 * 1024**2
    graphs = graphs_of(tower(tmp_path / "model.onnx", 1024, 8), **changes)
    held = []
    for stage in (0, 3):
        job = Job(f"tower{stage}", graphs, changes, stage, steps=2, measured=True)
        ranks = run_ranks(2, tmp_path / str(stage), [job])
        held.append([rank[job.name] for rank in ranks])
    plain, shared = held
    np.testing.assert_allclose(shared[0].curve, plain[0].curve, rtol=1e-5)
    for before, after in zip(plain, shared, strict=True):
        assert before.largest >= 8 * 1024**2 > 2 * after.largest - 2 * 1024**2
        saved = before.resident - after.resident
        assert 0.7 * state / 2 < saved < 1.3 * state / 2, (before.resident, after.resident)
