"""What an elastic run asks of Slurm and of Kubernetes, and how its status reads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_clock import FakeClock
from kubernetes_objects import JOB, NOW, Object, batch_job, mpijob, pod
from kubernetes_runs import one, rendered, run_file
from run_files import spec_of
from slurm_scripts import CASES, PLAIN

from ortflow.cli.status import describe, overview
from ortflow.launchers.base import Submission
from ortflow.launchers.kubernetes.pool import HostPool
from ortflow.launchers.kubernetes.snapshot import View
from ortflow.launchers.kubernetes.status import status
from ortflow.launchers.local import LocalLauncher
from ortflow.launchers.records import State
from ortflow.launchers.slurm.allocation import expected_start, hostnames, lost, would_start
from ortflow.launchers.slurm.commands import Slurm
from ortflow.launchers.slurm.fit import asked
from ortflow.launchers.slurm.runner import Answer, Settings
from ortflow.launchers.status import read_status
from ortflow.manifests.slurm import script
from ortflow.manifests.slurm.launch import launch, sized
from ortflow.manifests.slurm.trial import trial_spec
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.checks.nodes import on_nodes

SPEC, PLACEMENT = CASES["elastic"]


# ---- Slurm


def test_a_job_requests_a_range_of_nodes_and_what_each_must_have() -> None:
    lines = script(SPEC, PLACEMENT).splitlines()
    assert {"#SBATCH --nodes=2-4", "#SBATCH --mincpus=4", "#SBATCH --gpus-per-node=2"} <= set(lines)
    assert not any("ntasks" in line or "per-task" in line for line in lines if line.startswith("#SBATCH"))
    assert asked(SPEC).nodes == 2, "it can start on fewer"


def test_only_numbers_that_fit_are_requested() -> None:
    sections = {"train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 1.0}, "global_batch": 32}}
    spec = spec_of(resources={"nodes": 8, "min_nodes": 3}, **sections)
    assert "#SBATCH --nodes=4-8" in script(spec, PLAIN)


def test_ranks_are_started_on_the_nodes_of_the_attempt() -> None:
    words = launch(SPEC, PLACEMENT)
    assert not [word for word in words if word.startswith(("--nodes", "--ntasks="))]
    three = sized(words, on_nodes(SPEC, 3))
    assert three[:3] == ["srun", "--nodes=3", "--ntasks=6"]
    assert three[3:] == words[1:]


@pytest.mark.parametrize("name", ["mpirun-mpich", "mpirun-openmpi"])
def test_ranks_that_mpirun_starts(name: str) -> None:
    placement = CASES[name][1]
    words = launch(SPEC, placement)
    fewer = sized(words, on_nodes(SPEC, 2))
    assert words[words.index("-n") + 1] == "8"
    assert fewer[fewer.index("-n") + 1] == "4"
    assert len(fewer) == len(words)


def test_a_trial_takes_all_nodes() -> None:
    trial = trial_spec(SPEC, None)
    assert not trial.elastic
    assert trial.resources.nodes == 4


def slurm_of(*answers: Answer, clock: FakeClock | None = None) -> tuple[Slurm, list[list[str]]]:
    calls: list[list[str]] = []
    left = list(answers)

    def run(command: Sequence[str], settings: Settings, seconds: float) -> Answer:
        calls.append(list(command))
        return left.pop(0)

    return Slurm(run, clock or FakeClock()), calls


def expected(seconds: float) -> Answer:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
    words = f"sbatch: Job 9 to start at {moment} using 2 processors on nodes n[3-4] in partition main"
    return Answer(0, "", words)


@pytest.mark.parametrize(
    ("answer", "starts", "ever"),
    [
        (lambda now: expected(now), True, True),
        (lambda now: expected(now + 300.0), False, True),
        (lambda now: Answer(1, "", "allocation failure: Requested node configuration is not available"), False, False),
        (lambda now: Answer(0, "", ""), False, False),
    ],
)
def test_slurm_says_whether_more_nodes_are_free(tmp_path: Path, answer: Any, starts: bool, ever: bool) -> None:
    job = tmp_path / "job.sh"
    job.write_text("#!/bin/bash\n#SBATCH --nodes=2-4\n#SBATCH --exclude=n9\n#SBATCH --dependency=afterok:5\n")
    clock = FakeClock()
    slurm, calls = slurm_of(answer(clock.time()), clock=clock)
    assert would_start(slurm, job, 2, ["n1", "n2"]) is starts
    (call,) = calls
    assert {"--test-only", "--nodes=2", "--exclude=n1,n2,n9", "--dependency=", str(job)} <= set(call)
    slurm, _ = slurm_of(answer(clock.time()), clock=clock)
    assert (expected_start(slurm, job, 2, ["n1", "n2"]) is not None) is ever


def test_names_and_states_of_nodes() -> None:
    slurm, _ = slurm_of(
        Answer(0, "n1\nn2\n", ""),
        Answer(
            0,
            "NodeName=n1 State=IDLE CPUTot=4 RealMemory=1\nNodeName=n2 State=DOWN* CPUTot=4 RealMemory=1\n",
            "",
        ),
    )
    assert hostnames(slurm, "n[1-2]") == ["n1", "n2"]
    assert lost(slurm, ["n1", "n2"]) == ["n2"]
    assert lost(slurm, []) == []


# ---- Kubernetes


def test_the_launcher_pod_does_not_wait_for_all_workers() -> None:
    written = run_file(
        {"gang": {"scheduler": "volcano"}, "disruption_budget": True},
        resources={"nodes": 4, "min_nodes": 2, "ranks_per_node": 1},
    )
    found = rendered(written)
    job = one(found, "MPIJob")["spec"]
    assert job["launcherCreationPolicy"] == "AtStartup"
    assert job["mpiReplicaSpecs"]["Worker"]["replicas"] == 4
    assert job["runPolicy"]["schedulingPolicy"]["minAvailable"] == 2
    assert one(found, "PodDisruptionBudget")["spec"]["minAvailable"] == 3, "with the launcher pod"


@pytest.fixture
def daemon() -> Iterator[int]:
    """An ssh daemon as far as its first line; returns its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()

        def greet() -> None:
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"SSH-2.0-test\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        yield server.getsockname()[1]
        over.set()
        thread.join()


def test_hosts_that_answer_take_part(daemon: int) -> None:
    leaving: set[str] = set()
    pool = HostPool(["127.0.0.1", "localhost", "w-2.w.ns.invalid"], daemon, lambda host, address: host in leaving)
    assert pool.present(pool.names) == ["127.0.0.1", "localhost"]
    assert pool.addresses == {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}
    leaving.add("localhost")
    assert pool.present(["localhost"]) == []
    assert pool.addresses == {"127.0.0.1": "127.0.0.1"}
    assert pool.shown("w-2.w.ns.invalid") == "w-2"


WORDS = f"1 of 2 nodes: {JOB}-worker-1 is missing"


def records(*on: str) -> list[dict[str, Any]]:
    submit = {"event": "submit", "launcher": "kubernetes", "job": JOB}
    start = {"event": "start", "attempt": 0, "world_size": 2, "nodes": len(on), "on": [*on], "elastic": WORDS}
    return [submit, start]


def seen(found: list[dict[str, Any]], *pods: Object) -> Any:
    blank = read_status(RunDir(Path("/nowhere")), records=found, alive=True)
    return status(blank, found, View(mpijob(), NOW, batch_job(), [*pods, pod("launcher")], []))


def test_a_run_without_a_worker_that_it_does_not_use_is_running() -> None:
    gone = pod("worker", 1, phase="Failed")
    small = seen(records(f"{JOB}-worker-0"), pod("worker", 0), gone)
    assert small.state is State.RUNNING
    assert small.ranks == f"2, on {WORDS}"
    assert "worker 1 is dead" in small.waits
    whole = seen(records(f"{JOB}-worker-0", f"{JOB}-worker-1"), pod("worker", 0), gone)
    assert whole.state is State.RESTARTING


# ---- every backend


def test_status_and_list_show_ranks_and_the_reason() -> None:
    how = read_status(RunDir(Path("/nowhere/gpt")), records=records("a"), alive=True)
    assert ("ranks", f"2, on {WORDS}") in describe(how, NOW)
    head, row = overview([how], NOW)
    assert row[head.index("RANKS")] == "2, on 1 of 2 nodes"
    fixed = read_status(RunDir(Path("/nowhere/gpt")), records=[{"event": "start", "attempt": 0}], alive=True)
    assert "RANKS" not in overview([fixed], NOW)[0]


def test_only_an_elastic_run_has_several_nodes_on_this_machine(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    launcher.request(Submission(spec_of(resources={"nodes": 2, "min_nodes": 1}), RunDir(tmp_path)))
    for resources in ({"nodes": 2}, {"nodes": 2, "min_nodes": 2}):
        with pytest.raises(UserError, match="local backend has one machine"):
            launcher.request(Submission(spec_of(resources=resources), RunDir(tmp_path)))
