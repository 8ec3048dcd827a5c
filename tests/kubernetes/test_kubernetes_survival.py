"""Whatever happens to the pods of a run, its nodes and the cluster: the result is that of an undisturbed run.

Tests that are similar to another are marked `chaos`: they are slow, and not part of a plain `pytest`.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
from kubernetes_accidents import FAULTS, clocks_of
from kubernetes_cluster import ENDS, RANKS, Cluster, Run, faults, same_end, skewed, slow
from kubernetes_runs_seen import mpi_processes, rank_processes
from kubernetes_testbed import Space, Testbed, wait_until
from messages import mentions
from project import ORTFLOW, curve, of_kind

MIDDLE = 15
"""A step at which there is a checkpoint, and much is still to come."""
PACE = 0.15
"""Seconds that a step of the first attempt lasts at least: accidents hit a run that is under way."""
OPENMPI = {"backends__kubernetes__image": "localhost/ortflow:openmpi", "backends__kubernetes__mpi": "openmpi"}
OF_MPI = re.compile(r"(ompi\.|hydra_hwloc_|mpich_sh|sm_segment\.|ortflow_mpi_).*")
SUPERVISED = {"backends__kubernetes__supervisor": True}


def test_an_undisturbed_run(cluster: Cluster, left_alone: Path) -> None:
    """The same result again, and a follower that returns its exit code."""
    run = cluster.submit("again", "--follow")
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["finished"], run.transcript()
    hosts = {of_kind(run.run_dir, "attempt_start", rank)[0]["host"] for rank in range(4)}
    assert len(hosts) == 2, "its ranks are in two pods"
    nodes = [pod["spec"]["nodeName"] for pod in run.pods("worker")]
    assert len(set(nodes)) == len(nodes), "each on a node of its own while they exist: one may end before the other"


def test_the_same_loss_as_on_this_machine(left_alone: Path, trained_here: Path) -> None:
    close_end(left_alone, trained_here)


def test_the_launcher_pod_is_deleted(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("launcher-deleted", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    run.space.kubectl("delete", "pod", run.pod("launcher"), "--wait=false")
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"], run.transcript()
    assert not of_kind(run.run_dir, "rewind"), "it saved when it was asked"


@pytest.mark.chaos
def test_the_launcher_pod_is_killed(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("launcher-killed", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    run.space.kubectl("delete", "pod", run.pod("launcher"), "--force", "--grace-period=0", "--wait=false")
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() in (["lost", "finished"], ["preempted", "finished"])


def test_a_worker_pod_is_deleted(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("worker-deleted", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    run.space.kubectl("delete", "pod", run.pod("worker", 1), "--wait=false")
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"], run.transcript()
    assert not of_kind(run.run_dir, "rewind"), "it saved when it was asked"
    assert len(run.pods("launcher")) == 1, "the operator did not react"


@pytest.mark.chaos
def test_a_worker_pod_vanishes(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("worker-vanished", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    run.space.kubectl("delete", "pod", run.pod("worker", 0), "--force", "--grace-period=0", "--wait=false")
    run.finish()
    same_end(run.run_dir, left_alone)
    assert "failure" not in run.outcomes(), "that is not the run's fault"


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.chaos), 3])
def test_a_rank_is_killed(cluster: Cluster, left_alone: Path, rank: int) -> None:
    run = cluster.submit(f"killed-{rank}", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    rank_processes(run)[rank].kill()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["failure", "finished"], run.transcript()
    assert f"rank {rank} was killed by SIGKILL" in run.records("end")[0]["cause"]
    assert len(run.pods("launcher")) == 1, "in the existing pods"


@pytest.mark.chaos
def test_all_ranks_of_a_worker_are_killed(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("killed-two", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    processes = rank_processes(run)
    for rank in (2, 3):
        processes[rank].kill()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["failure", "finished"], run.transcript()


@pytest.mark.chaos
def test_all_ranks_are_killed_while_they_start(cluster: Cluster, left_alone: Path) -> None:
    """None has recorded which process it is, and Hydra's proxy may fail with them."""
    run = cluster.submit("killed-early")
    wait_until(lambda: len(rank_processes(run)) == 4, ENDS, run.transcript)
    for process in rank_processes(run).values():
        process.kill()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["failure", "finished"], run.transcript()
    cause = run.records("end")[0]["cause"]
    assert re.match(r"(rank \d|a rank on \S+-worker-[01]) was killed by SIGKILL", cause), run.transcript()


@pytest.mark.chaos
def test_a_rank_hangs(cluster: Cluster, left_alone: Path) -> None:
    restart = {"failures": 3, "hung_seconds": 20.0, "backoff": {"first": 0.0, "limit": 0.0}}
    run = cluster.submit("hangs", restart=restart, **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    rank_processes(run)[3].suspend()
    run.finish()
    same_end(run.run_dir, left_alone)
    assert mentions(run.records("end")[0]["cause"], "hung", "20 s")


@pytest.mark.rotates("Kubernetes")
def test_a_worker_is_out_of_memory(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.run("hog", **faults(cluster, 2, MIDDLE, "hog"))
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["failure", "finished"], run.transcript()
    assert "out of memory" in run.records("end")[0]["cause"]


@pytest.mark.chaos
def test_a_worker_is_evicted(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("evicted", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    evict(run, run.pod("worker", 0))
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"], run.transcript()


@pytest.mark.chaos
def test_a_worker_is_evicted_for_its_use_of_disk(cluster: Cluster, left_alone: Path) -> None:
    """The operator does not remove the dead pod; the supervisor does."""
    scratch = {"backends__kubernetes__ephemeral_storage": "100M", **SUPERVISED}
    run = cluster.submit("disk", **scratch, **slow(cluster, 0.5, attempts=1))
    run.until_step(MIDDLE)
    victim = run.pod("worker", 1)
    fill = ["dd", "if=/dev/zero", "of=/tmp/fill", "bs=1M", "count=300"]
    run.space.testbed.ask("kubectl", "-n", run.space.name, "exec", victim, "--", *fill)
    # The supervisor replaces the pod within two seconds; its event stays.
    wait_until(lambda: evictions(run.space, victim), 120, run.transcript)
    run.finish(timeout=300)
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"], run.transcript()


@pytest.mark.chaos
def test_a_node_is_drained(kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("drained", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    drain = ("drain", "n2", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    kubernetes_testbed.kubectl(*drain, timeout=90)
    run.finish()
    same_end(run.run_dir, left_alone)
    assert set(run.outcomes()[:-1]) == {"preempted"}


@pytest.mark.chaos
@pytest.mark.parametrize("which", ["worker", "launcher"])
def test_a_node_is_switched_off(kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path, which: str) -> None:
    """Its pods would stay Terminating; the supervisor removes them."""
    run = cluster.submit(f"off-{which}", **SUPERVISED, **slow(cluster, 0.5, attempts=1))
    run.until_step(MIDDLE)
    launcher = run.pods("launcher")[0]["spec"]["nodeName"]
    kubernetes_testbed.node("off", launcher if which == "launcher" else "n1" if launcher == "n2" else "n2")
    run.finish(timeout=400)
    same_end(run.run_dir, left_alone)
    assert "failure" not in run.outcomes(), "a lost node is not the run's fault"


@pytest.mark.chaos
def test_the_launchers_node_is_off_and_a_terminal_supervises(
    kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path
) -> None:
    """Its log cannot be read: status reports that, and nothing waits for it."""
    run = cluster.submit("off-terminal", **slow(cluster, 0.5, attempts=1))
    run.until_step(MIDDLE)
    node = run.pods("launcher")[0]["spec"]["nodeName"]
    kubernetes_testbed.node("off", node)
    words = f"node {node} … launcher pod … does not answer"
    wait_until(lambda: mentions(str(run.status()["waits"]), words), 120, lambda: str(run.status()))
    done = cluster.ortflow("supervise", run.name, timeout=400)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{run.transcript()}"
    same_end(run.run_dir, left_alone)
    assert "failure" not in run.outcomes(), "a lost node is not the run's fault"


@pytest.mark.chaos
def test_preempted_and_pending(kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path) -> None:
    space = cluster.space
    run = cluster.submit("preempted", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    victim = run.pods("worker")[1]
    node = victim["spec"]["nodeName"]
    kubernetes_testbed.kubectl("cordon", "n1" if node == "n2" else "n2")
    urgent(space, node)
    wait_until(lambda: space.phase(victim["metadata"]["name"]) == "Pending", 120, run.transcript)
    reported = run.until_state("restarting", "pending", "running")
    wait_until(
        lambda: "nodes are available" in str(run.status()["waits"]), 120, lambda: f"{reported}{run.transcript()}"
    )
    time.sleep(60)
    space.kubectl("delete", "pod", "urgent", "--force", "--grace-period=0")
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"], run.transcript()
    assert run.records("end")[-1]["attempt"] == 1, "a pending worker costs no attempt"
    assert len(run.pods("launcher")) == 1, "and no retry by the operator"


@pytest.mark.chaos
def test_suspended_and_resumed(cluster: Cluster, left_alone: Path) -> None:
    space = cluster.space
    run = cluster.submit("suspended", **slow(cluster, PACE, attempts=1))
    run.until_step(MIDDLE)
    name = run.job()["metadata"]["name"]
    suspend(space, name, True)
    wait_until(lambda: not run.pods("worker"), 120, run.transcript)
    wait_until(lambda: "suspended" in str(run.status()["waits"]), 120, lambda: f"{run.status()}{run.transcript()}")
    suspend(space, name, False)
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"], run.transcript()
    assert not of_kind(run.run_dir, "rewind")


@pytest.mark.chaos
def test_the_api_server_is_away(kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("api-away", **slow(cluster, 1.0))
    follower = subprocess.Popen(
        [*ORTFLOW, "logs", "-f", "api-away"],
        cwd=cluster.folder, env=kubernetes_testbed.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    run.until_step(5)
    with kubernetes_testbed.without("apiserver"):
        time.sleep(30)
    run.finish(timeout=300)
    reported, _ = follower.communicate(timeout=120)
    assert follower.returncode == 0, reported
    same_end(run.run_dir, left_alone)
    assert "failure" not in run.outcomes()


@pytest.mark.chaos
def test_the_operator_is_started_again(kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("operator", **slow(cluster, PACE, attempts=1))
    run.until_step(5)
    with kubernetes_testbed.without("operator"):
        run.space.kubectl("delete", "pod", run.pod("worker", 0), "--wait=false")
        time.sleep(5)
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["preempted", "finished"], run.transcript()


@pytest.mark.chaos
def test_a_cable_is_out(kubernetes_testbed: Testbed, cluster: Cluster, left_alone: Path) -> None:
    run = cluster.submit("cable", **slow(cluster, 0.5, attempts=1))
    run.until_step(MIDDLE)
    kubernetes_testbed.node("cut", "n2")
    time.sleep(16)
    kubernetes_testbed.node("heal", "n2")
    run.finish(timeout=300)
    same_end(run.run_dir, left_alone)
    assert "failure" not in run.outcomes()


@pytest.mark.chaos
@pytest.mark.parametrize("seconds", [7200, -7200])
def test_a_clock_is_set(cluster: Cluster, left_alone: Path, seconds: int) -> None:
    """First a worker's, then the launcher pod's. No attempt may fail, and a client whose clock is ahead must not
    take over the run."""
    clocks, variables = clocks_of(cluster)
    changes = slow(cluster, 0.5)
    changes["backends__kubernetes__env"] |= variables
    restart = {"failures": 0, "preemptions": 0, "hung_seconds": 60.0}
    run = cluster.submit("clocks", restart=restart, **changes)
    run.until_step(5)
    (clocks / run.pod("worker", 0)).write_text(str(seconds))
    run.until_step(MIDDLE)
    # A launcher pod's host has the name of its batch Job.
    (clocks / run.pod("launcher").rpartition("-")[0]).write_text(str(seconds))
    second = cluster.ortflow("submit", "-b", "kubernetes", "clocks.yaml", PYTHONPATH=str(FAULTS), SKEW="ortflow 300")
    assert second.returncode == 2, second.stdout
    assert "is running" in second.stderr
    run.finish()
    same_end(run.run_dir, left_alone)
    assert run.outcomes() == ["finished"], run.transcript()
    assert abs(run.records("end")[0]["time"] - time.time() - seconds) < 600, "the launcher pod's clock was set"
    hosts = {of_kind(run.run_dir, "attempt_start", rank)[0]["host"]: rank for rank in RANKS}
    ends = [of_kind(run.run_dir, "step", rank)[-1]["time"] - time.time() for rank in hosts.values()]
    assert max(ends) - min(ends) > abs(seconds) - 600, "one worker's clock was set"


@pytest.mark.rotates("Kubernetes")
def test_openmpi(cluster: Cluster, left_alone: Path) -> None:
    """Rounding depends on the order in its all-reduce; as with MPICH, a lost worker loses no progress."""
    run = cluster.submit("openmpi", **OPENMPI)
    run.until_step(MIDDLE)
    run.space.kubectl("delete", "pod", run.pod("worker", 1), "--wait=false")
    run.finish()
    assert run.outcomes()[-1] == "finished"
    assert "failure" not in run.outcomes()
    close_end(run.run_dir, left_alone)


@pytest.mark.chaos
@pytest.mark.parametrize("other", [{}, OPENMPI], ids=["mpich", "openmpi"])
def test_a_killed_attempt_leaves_nothing_in_its_pods(cluster: Cluster, other: dict[str, str]) -> None:
    """The workers go on, and the next attempt removes what the killed MPI kept in /tmp and /dev/shm."""
    run = cluster.submit("leftovers", **slow(cluster, 0.3), **other)
    run.until_step(MIDDLE)
    killed = files_of_mpi(run)
    assert len(killed) >= 4, "there is something of each rank"
    for process in mpi_processes(run):
        process.kill()
    wait_until(lambda: len(run.records("start")) == 2, ENDS, run.transcript)
    there = run.steps()
    run.until_step(there + 2)
    assert killed & files_of_mpi(run) == set()
    run.finish()
    assert run.outcomes() == ["failure", "finished"], run.transcript()


def files_of_mpi(run: Run) -> set[str]:
    """What MPI and the ranks keep in the workers outside of the volume."""
    found = set()
    for pod in run.pods("worker"):
        name = pod["metadata"]["name"]
        listed = run.space.kubectl("exec", name, "--", "sh", "-c", "ls -A /tmp /dev/shm").split()
        found |= {f"{name}/{file}" for file in listed if OF_MPI.fullmatch(file)}
    return found


@pytest.mark.chaos
def test_the_launcher_as_a_worker(cluster: Cluster, left_alone: Path) -> None:
    run = cluster.run("as-worker", backends__kubernetes__launcher_as_worker=True)
    same_end(run.run_dir, left_alone)
    hosts = {of_kind(run.run_dir, "attempt_start", rank)[0]["host"] for rank in range(4)}
    assert any(host.endswith("-launcher") for host in hosts)


def test_given_up(cluster: Cluster) -> None:
    """A run that fails repeatedly ends as failed, and holds no worker while the operator still retries."""
    restart = {"failures": 1, "backoff": {"first": 0.0, "limit": 0.0}}
    run = cluster.submit("given-up", restart=restart, **faults(cluster, 1, 2, "raise", attempt=None))
    wait_until(lambda: run.outcomes() == ["failure", "failure"], ENDS, run.transcript)
    wait_until(lambda: phases(run) == {"Succeeded"}, 120, run.transcript)
    reported = run.until_state("failed", timeout=120)
    assert "this rank was told to raise" in reported["cause"]
    assert reported["why"] == "the budget of 1 failure is spent"
    assert "the budget of 1 failure is spent" in cluster.ortflow("status", "given-up").stdout
    assert not run.space.condition(run.job()["metadata"]["name"], "Succeeded")


@pytest.mark.chaos
def test_wrong_input(cluster: Cluster) -> None:
    """What only the pods can see is reported, tried once, and holds no resources."""
    run = cluster.submit("wrong", model__path="elsewhere.onnx")
    reported = run.until_state("failed", timeout=120)
    assert "elsewhere.onnx" in reported["cause"]
    assert reported["attempts"] == 0
    wait_until(lambda: phases(run) == {"Succeeded"}, 120, run.transcript)


@pytest.mark.chaos
def test_submitted_again_when_it_is_finished(cluster: Cluster) -> None:
    run = cluster.run("twice", train__steps=5)
    first = run.job()["metadata"]["name"]
    (cluster.folder / "runs/twice/attempts.jsonl").unlink()  # as by a user without its record
    run = cluster.submit("twice", train__steps=5)
    assert run.job()["metadata"]["name"] != first
    run.finish()
    assert run.outcomes() == ["finished"], "nothing was left to do"


@pytest.mark.chaos
@pytest.mark.parametrize("ahead", [0, 300])
def test_two_simultaneous_submissions(cluster: Cluster, ahead: int) -> None:
    """Here and by kubectl, from a launcher pod whose clock is ahead: the second is refused, the first continues."""
    space = cluster.space
    # Slower than the second one waits to see whether the first one is alive.
    first = cluster.submit("both", **slow(cluster, 2.5))
    first.until_step(3)
    name = first.job()["metadata"]["name"]
    cluster.write("both", **skewed(cluster, "ortflow.launchers.kubernetes.run_supervisor", ahead))
    space.kubectl("apply", "-f", "-", given=cluster.ortflow("render", "-b", "kubernetes", "both.yaml").stdout)

    def second() -> str:
        pods = space.pods("ortflow.dev/run=both,ortflow.dev/component=launcher")
        others = [pod["metadata"]["name"] for pod in pods if not pod["metadata"]["name"].startswith(name)]
        return space.testbed.ask("kubectl", "-n", space.name, "logs", others[0]).stdout if others else ""

    wait_until(lambda: f"is in use by the MPIJob {name}" in second(), 120, first.transcript)
    step = first.steps()
    first.until_step(step + 2)
    assert len(first.records("start")) == 1


def test_deleted(cluster: Cluster) -> None:
    """kubectl delete ends everything; what stays is the volume. Before that, `resume` refuses, and changes nothing."""
    run = cluster.submit("deleted", **slow(cluster, 1.0))
    run.until_step(2)
    space = cluster.space
    job, before = run.job()["metadata"]["name"], run.records("submit")
    known = (cluster.folder / "runs/deleted/run.yaml").read_text()
    done = cluster.ortflow("resume", "deleted", "train.steps=50")
    assert done.returncode == 2, done.stdout
    assert f"is running as MPIJob {job}" in done.stderr
    assert done.stdout == ""
    assert "no longer count" not in done.stderr
    assert (cluster.folder / "runs/deleted/run.yaml").read_text() == known
    assert [item["metadata"]["name"] for item in space.get("mpijobs")["items"]] == [job]
    assert run.records("submit") == before
    space.kubectl("delete", "mpijob", run.job()["metadata"]["name"], "--wait=true", timeout=90)
    kinds = "mpijobs,jobs,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings"
    usual = {"kube-root-ca.crt", "default"}

    def left() -> set[str]:
        return {item["metadata"]["name"] for item in space.get(kinds)["items"]} - usual

    wait_until(lambda: not left(), 120, lambda: str(left()))
    assert run.outcomes() == ["preempted"], run.transcript()
    assert (run.run_dir / "checkpoints").is_dir()
    assert [item["metadata"]["name"] for item in space.get("pvc")["items"]] == ["data"]


def phases(run: Run) -> set[str]:
    """The phases of its workers."""
    return {pod["status"]["phase"] for pod in run.pods("worker")}


def evictions(space: Space, pod: str) -> int:
    """How many events of the kubelet report that it evicted a pod."""
    return len(space.get("events", "--field-selector", f"reason=Evicted,involvedObject.name={pod}")["items"])


def evict(run: Run, pod: str) -> None:
    """Ask the API server to evict a pod, as a drain does."""
    path = f"/api/v1/namespaces/{run.space.name}/pods/{pod}/eviction"
    asked = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": run.space.name}}
    run.space.testbed.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(asked))


def suspend(space: Space, mpijob: str, wanted: bool) -> None:
    """Suspend or resume as Kueue does."""
    patch = json.dumps({"spec": {"runPolicy": {"suspend": wanted}}})
    space.kubectl("patch", "mpijob", mpijob, "--type=merge", "-p", patch)


def urgent(space: Space, node: str) -> None:
    """A pod of higher priority that takes all free capacity of a node."""
    testbed = space.testbed
    urgent = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    testbed.ask("kubectl", "create", "-f", "-", given=json.dumps(urgent))
    container = {
        "name": "c", "image": "localhost/ortflow:testbed", "command": ["sleep", "3600"],
        "resources": {"requests": {"cpu": "7"}},
    }  # fmt: skip
    pod = {"priorityClassName": "urgent", "nodeSelector": {"kubernetes.io/hostname": node}, "containers": [container]}
    space.make_all({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "urgent"}, "spec": pod})


def close_end(run_dir: Path, left_alone: Path) -> None:
    """Check that the results are equal to rounding."""
    ours, theirs = curve(run_dir), curve(left_alone)
    assert [step for step, *_ in ours] == [step for step, *_ in theirs]
    for (_, *mine), (_, *other) in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4)
