"""The basic parts: layout, ranks, cores, events, signals, engine, early stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortflow.workflow.layout import ALIGNMENT, GROUPS, FlatIndex, Tensor, share
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.engine import Engine, Step
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.progress import Progress, dropout_seed
from ortflow.workflow.run.record import EVENTS, read_records
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.spec.train import EarlyStop
from ortflow.workflow.steps.early_stop import judge, still_stopped
from ortflow.workflow.system.cores import Grant, cores_of

tensors = st.lists(
    st.builds(
        lambda shape, group: (tuple(shape), group),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(GROUPS),
    ),
    max_size=12,
).map(lambda rows: [Tensor(f"t{i}", shape, group) for i, (shape, group) in enumerate(rows)])


@given(tensors)
def test_tensors_lie_apart_aligned_and_in_order_of_their_groups(rows: list[Tensor]) -> None:
    index = FlatIndex.place(rows)
    end = 0
    for entry in index:
        assert entry.offset >= end
        assert entry.offset % ALIGNMENT == 0
        end = entry.end
    assert [GROUPS.index(e.tensor.group) for e in index] == sorted(GROUPS.index(t.group) for t in rows)
    assert index.size >= end
    for group in GROUPS:
        start, stop = index.span(group)
        inside = [e.name for e in index if start <= e.offset and e.end <= stop and e.tensor.count]
        assert inside == [t.name for t in rows if t.group == group and t.count]
    assert FlatIndex.from_json(json.loads(json.dumps(index.to_json()))).to_json() == index.to_json()


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_shares_cover_a_buffer_once(size: int, world: int) -> None:
    shares = [share(size, rank, world) for rank in range(world)]
    covered = [i for start, stop in shares for i in range(start, stop)]
    assert covered == list(range(size))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0, 1, "none")),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (3, 4, 1, 2, "MPICH")),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "SLURM_PROCID": "0",
            },
            (1, 2, 1, 2, "Open MPI"),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            (5, 8, 1, 4, "Slurm"),
        ),
        # The shell of salloc and the batch script are not ranks, though Slurm numbers them.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, 1, "none")),
    ],
)
def test_a_rank_reads_its_place(environment: dict[str, str], expected: tuple[int, int, int, int, str]) -> None:
    place = Place.from_environment(environment)
    assert (place.rank, place.world_size, place.local_rank, place.local_size, place.manager) == expected


def test_two_ranks_on_two_cores_take_one_each() -> None:
    both = Grant("a", frozenset({0, 1}), None, "")
    assert cores_of(both, [both, both]) == 1
    assert cores_of(both, [both]) == 2


def test_bound_ranks_keep_their_own_cores() -> None:
    ranks = [Grant("a", frozenset({0, 1, 2}), None, ""), Grant("a", frozenset({3, 4}), None, "")]
    assert [cores_of(rank, ranks) for rank in ranks] == [3, 2]


def test_a_quota_counts_less_than_the_mask() -> None:
    limited = Grant("a", frozenset(range(64)), 4.0, "/job")
    elsewhere = Grant("b", frozenset(range(64)), 4.0, "/job")
    assert cores_of(limited, [limited, limited, elsewhere]) == 2
    assert cores_of(Grant("a", frozenset({0}), 0.5, "/job"), [limited]) == 1


def test_rewinding_takes_back_the_steps_behind_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-0000.jsonl"
    log = EventLog(path, 0, 0)
    for step in range(1, 6):
        log.write("step", step=step, loss=float(step), seconds=0.5)
    log.write("evaluation", step=5, loss=1.0, seconds=2.0)
    log.write("checkpoint", step=3)
    log.close()
    with path.open("ab") as file:
        file.write(b'{"event":"step","step":6,"lo')
    again = EventLog(path, 0, 1)
    again.rewind(3)
    again.write("step", step=4, loss=float("nan"))
    records = read_records(path, EVENTS)[0]
    assert [r["step"] for r in records if r["event"] == "step"] == [1, 2, 3, 4]
    assert records[-1]["loss"] is None
    (rewind,) = [r for r in records if r["event"] == "rewind"]
    assert (rewind["from_step"], rewind["to_step"], rewind["seconds"], rewind["attempt"]) == (5, 3, 3.0, 1)
    assert [r for r in records if r["event"] == "checkpoint"]
    assert all(line.startswith("{") and line.endswith("}") for line in path.read_text().splitlines())


def test_an_event_is_the_json_that_pythons_encoder_writes(tmp_path: Path) -> None:
    fields = {
        "step": 3, "loss": 0.1, "lr": 1e-7, "big": 1e300, "text": 'a "b"\n\u00e9', "on": True, "none": None,
        "f1.\u00e9": np.float64(0.3), "list": [1, {"a": 2.5}], "zero": -0.0,
    }  # fmt: skip
    log = EventLog(tmp_path / "e.jsonl", 2, 1)
    log.write("step", **fields, infinite=float("inf"), nan=np.float64("nan"))
    (line,) = (tmp_path / "e.jsonl").read_text().splitlines()
    _, _, written = line.partition('"rank":2,')
    expected = json.dumps({**fields, "infinite": None, "nan": None}, separators=(",", ":"))
    assert "{" + written == expected
    record = json.loads(line)
    assert (record["event"], record["attempt"], record["rank"]) == ("step", 1, 2)
    assert abs(record["time"] - time.time()) < 60


def test_nothing_to_rewind_leaves_the_record_alone(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl", 0, 0)
    log.write("step", step=1)
    before = (tmp_path / "e.jsonl").read_bytes()
    log.rewind(1)
    assert (tmp_path / "e.jsonl").read_bytes() == before


def test_a_signal_or_a_file_asks_to_leave(tmp_path: Path) -> None:
    file = tmp_path / ".stop"
    flag = StopFlag(file)
    assert not flag
    flag.request("SIGTERM")
    flag.request("later")
    assert flag.reason == "SIGTERM"
    file.touch()
    assert StopFlag(file).reason == "stop file"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_stop_signals_set_the_flag_of_a_real_process(number: signal.Signals) -> None:
    program = (
        "import os, sys; from ortflow.workflow.run.signals import StopFlag; f = StopFlag(); f.install();"
        f"os.kill(os.getpid(), {int(number)}); print(f.reason)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == number.name


def test_the_engine_runs_in_order_and_reports_start_end_and_time(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl", 0, 0)
    done: list[str] = []

    def first(context: list[str]) -> None:
        with engine.within("saving"):
            context.append("saved inside")
        context.append("first")

    engine = Engine(
        (Step("first", first), Step("saving", lambda context: context.append("saved at the end"), recurs=True)), log
    )
    engine.run(done)
    assert done == ["saved inside", "first", "saved at the end"]
    records = read_records(tmp_path / "e.jsonl", EVENTS)[0]
    assert [(r["event"], r["phase"]) for r in records] == [
        ("phase_start", "first"),
        ("phase_end", "first"),
        ("phase_start", "saving"),
        ("phase_end", "saving"),
    ]
    assert records[-1]["times"] == 2
    assert all(r["seconds"] >= 0 for r in records if r["event"] == "phase_end")


def test_a_failing_step_ends_the_run_and_is_still_timed(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "e.jsonl", 0, 0)

    def fail(context: None) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        Engine((Step("fails", fail), Step("never", lambda context: None)), log).run(None)
    assert [r["event"] for r in read_records(tmp_path / "e.jsonl", EVENTS)[0]] == ["phase_start", "phase_end"]


def test_early_stop_counts_evaluations_without_improvement() -> None:
    progress = Progress()
    rule = EarlyStop(metric="loss", patience=2, min_delta=0.1)
    assert [judge(rule, progress, value) for value in (1.0, 0.95, 0.5, 0.45, 0.44)] == [False] * 4 + [True]
    progress = Progress()
    rule = EarlyStop(metric="accuracy", patience=1)
    assert [judge(rule, progress, value) for value in (0.5, 0.6, 0.6)] == [False, False, True]
    progress = Progress()
    rule = EarlyStop(metric="loss", patience=2)
    for step, (value, stops) in enumerate(zip((1.1, 1.0, 0.5, 0.55, 0.6), [False] * 4 + [True], strict=True)):
        progress.step = step
        assert judge(rule, progress, value) == stops
    assert (progress.best_metric, progress.best_step) == (0.5, 2)


def test_another_rule_takes_up_a_run_that_stopped_early() -> None:
    rule = EarlyStop(metric="loss", patience=2)
    progress = Progress()
    assert [judge(rule, progress, value, "loss") for value in (0.2, 0.3, 0.3)] == [False, False, True]
    progress.stopped_early = True
    assert still_stopped(rule, progress, "loss")
    assert not still_stopped(EarlyStop(metric="loss", patience=3), progress, "loss")
    assert not still_stopped(None, progress)
    other = EarlyStop(metric="accuracy", patience=2)
    assert not still_stopped(other, progress, "accuracy")
    assert [judge(other, progress, value, "accuracy") for value in (0.1, 0.1, 0.1)] == [False, False, True]


def test_progress_survives_its_json_and_unknown_fields() -> None:
    progress = Progress(step=7, epoch=1, sample=3, best_metric=0.5, best_of="loss on eval.arrow")
    assert Progress.from_json({**json.loads(json.dumps(progress.to_json())), "later": 1}) == progress


def test_dropout_seeds_differ_by_place_and_repeat() -> None:
    places = [(step, place) for step in range(20) for place in range(9)]
    seeds = {dropout_seed(0, *place) for place in places}
    assert len(seeds) == len(places)
    assert dropout_seed(0, 1, 2) == dropout_seed(0, 1, 2)


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_atomically(path, b"old")

    def refuse(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
