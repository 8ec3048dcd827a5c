"""The status of a run, from objects as a real cluster shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_objects import JOB, NOW, Object, batch_job, event, mpijob, pod, stamp, unschedulable
from messages import mentions, says

from ortflow.launchers.kubernetes import avoidance
from ortflow.launchers.kubernetes.launcher import _no_log
from ortflow.launchers.kubernetes.reasons import scheduler_reason
from ortflow.launchers.kubernetes.snapshot import View
from ortflow.launchers.kubernetes.status import status
from ortflow.launchers.records import State
from ortflow.launchers.status import RunStatus, read_status
from ortflow.workflow.run.rundir import RunDir

SUBMIT = {"event": "submit", "launcher": "kubernetes", "job": JOB}
START = {"event": "start", "attempt": 0}
END = {"event": "end", "attempt": 0, "outcome": "preempted", "next": "restart", "cause": "saved and stopped"}
WORKERS = [pod("worker", 0), pod("worker", 1, node="n2")]
LAUNCHER = pod("launcher")
SCHEDULER = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available: 2 No preemption victims."


def reported(
    records: list[dict[str, Any]],
    pods: list[Object],
    *,
    job: Object | None = None,
    silent: tuple[str, ...] = (),
    unread: tuple[str, ...] = (),
    **view: Any,
) -> RunStatus:
    given = {"mpijob": mpijob(), "job": job or batch_job(), "events": [], **view}
    shown = View(given["mpijob"], NOW, given["job"], pods, given["events"], given.get("workload"))
    blank = read_status(RunDir(Path("/nowhere")), records=records, alive=True)
    return status(replace(blank, job=JOB), records, shown, silent=silent, unread=unread)


def test_a_new_launcher_pod_has_no_attempt_of_its_own_yet() -> None:
    """The attempt that the records show as running died with the previous pod."""
    second = pod("launcher", 1, created=NOW - 2)
    pods = [*WORKERS, pod("launcher", phase="Failed"), second]
    assert reported([SUBMIT, START], pods).state is State.RUNNING
    how = reported([SUBMIT, START], pods, silent=(second["metadata"]["uid"],))
    assert how.state is State.RESTARTING
    assert mentions(how.waits or "", "starting", "launcher pod", "not begun")


def test_a_launcher_pod_that_cannot_be_reached() -> None:
    """The last known state is shown besides, without a claim whether its attempt has begun."""
    uid = LAUNCHER["metadata"]["uid"]
    words = "… node n1 … launcher pod … does not answer"
    how = reported([SUBMIT, START], [*WORKERS, LAUNCHER], unread=(uid,))
    assert how.state is State.RUNNING
    assert says(how.waits or "", words)
    how = reported([SUBMIT], [*WORKERS, LAUNCHER], unread=(uid,), silent=(uid,))
    assert how.state is State.PENDING
    assert says(how.waits or "", words)
    assert reported([SUBMIT, START], [*WORKERS, LAUNCHER], unread=("another",)).waits is None


def test_a_launcher_pod_that_does_not_count_as_a_retry() -> None:
    how = reported([SUBMIT, START], [*WORKERS, pod("launcher", phase="Failed")])
    assert "0 of 10 retries are used" in (how.waits or "")


def test_at_work() -> None:
    how = reported([SUBMIT, START], [*WORKERS, LAUNCHER])
    assert (how.state, how.waits, how.nodes, how.job) == (State.RUNNING, None, "n1, n2", JOB)


def test_an_attempt_continues_while_workers_are_not_ready() -> None:
    """After an outage of the API server no pod is ready until its node has reported again."""
    how = reported([SUBMIT, START], [pod("worker", 0, ready=False), pod("worker", 1, ready=False), LAUNCHER])
    assert how.state is State.RUNNING
    assert says(how.waits or "", "0 of 2 workers … do not report")
    how = reported([SUBMIT, START], [pod("worker", 0), LAUNCHER])
    assert how.state is State.RESTARTING
    assert mentions(how.waits or "", "waiting for workers", "1 of 2")


def test_a_quota_that_keeps_one_worker_from_being_made() -> None:
    """Until the pod is there: what was said before the newest one tells of what is over."""
    words = 'worker pod created failed: pods "x" is forbidden: exceeded quota: q'
    how = reported([SUBMIT, START], [pod("worker", 0), LAUNCHER], events=[event(JOB, "MPIJobFailed", words)])
    assert how.state is State.RESTARTING
    assert mentions(how.waits or "", "pod", 'pods "x" is forbidden: exceeded quota: q')
    later = [event(JOB, "MPIJobFailed", words, age=60.0)]
    how = reported([SUBMIT, START], [pod("worker", 0), LAUNCHER], events=later)
    assert mentions(how.waits or "", "waiting for workers", "1 of 2")


NO_OTHER_NODE = (
    "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) didn't match Pod's node affinity/selector. "
    "preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."
)


def without(*nodes: str) -> Object:
    job = mpijob()
    template = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    template["spec"]["affinity"] = avoidance.avoiding({}, nodes)
    return job


WAITING: list[tuple[str, list[Object], dict[str, Any], str]] = [
    ("before the operator", [], {"mpijob": mpijob(5, conditions=[])}, "the operator has not processed it yet"),
    (
        "no operator", [], {"mpijob": mpijob(20, conditions=[])},
        "no operator has processed it for 20 s: is the mpi-operator running?",
    ),
    (
        "no room", [pod("worker", 0), pod("worker", 1, **unschedulable(SCHEDULER))], {},
        "worker 1 cannot be scheduled: 0/2 nodes are available: 2 Insufficient cpu; lower what resources",
    ),
    (
        "an excluded node", [pod("worker", 0), pod("worker", 1, **unschedulable(NO_OTHER_NODE))],
        {"mpijob": without("n2", "n3")},
        "worker 1 has no node: no other node has room, and n2, n3 are excluded (0/3 nodes are available: "
        "1 Insufficient cpu, 2 node(s) didn't match Pod's node affinity/selector); add a node",
    ),
    (
        "no room, and an excluded node elsewhere", [pod("worker", 0), pod("worker", 1, **unschedulable(SCHEDULER))],
        {"mpijob": without("n2")},
        "worker 1 cannot be scheduled: 0/2 nodes are available: 2 Insufficient cpu; lower what resources",
    ),
    (
        "GPUs", [pod("worker", 0, **unschedulable("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."))], {},
        "2 Insufficient nvidia.com/gpu; lower resources.ranks_per_node",
    ),
    (
        "a gate",
        [pod("worker", 0, phase="Pending", node="", ready=False, conditions=[
            {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}])],
        {}, "worker 0 is held back by a scheduling gate",
    ),
    (
        "pulling", [pod("worker", 0, phase="Pending", ready=False, state={"waiting": {"reason": "ContainerCreating"}})],
        {"events": [event(f"{JOB}-worker-0", "Pulling", "Pulling image", "Normal")]}, "worker 0 is pulling its image",
    ),
    (
        "no such image",
        [pod("worker", 0, phase="Pending", ready=False, state={"waiting": {"reason": "ImagePullBackOff"}})],
        {"events": [event(f"{JOB}-worker-0", "Failed", 'Failed to pull image "localhost/ortflow:test": not found')]},
        "worker 0 cannot pull the image localhost/ortflow:test: not found; correct backends.kubernetes.image",
    ),
    (
        "never pulled",
        [pod("worker", 0, phase="Pending", ready=False, state={"waiting": {"reason": "ErrImageNeverPull"}})],
        {}, "has no image localhost/ortflow:test on its node, and backends.kubernetes.image_pull_policy is Never",
    ),
    (
        "no volume",
        [pod("worker", 0, phase="Pending", ready=False, state={"waiting": {"reason": "ContainerCreating"}})],
        {"events": [event(f"{JOB}-worker-0", "FailedMount", 'MountVolume.SetUp failed for volume "data": no export')]},
        'worker 0 waits for a volume: MountVolume.SetUp failed for volume "data": no export',
    ),
    (
        "no secret",
        [pod("worker", 0, phase="Pending", ready=False, state={
            "waiting": {"reason": "CreateContainerConfigError", "message": 'secret "keys" not found'}})],
        {}, 'worker 0 cannot be started: secret "keys" not found',
    ),
    (
        "crashes",
        [pod("worker", 0, ready=False, state={"waiting": {"reason": "CrashLoopBackOff"}}, last={
            "terminated": {"exitCode": 1, "message": "no sshd"}})],
        {}, "worker 0 keeps ending: no sshd (exit code 1)",
    ),
    ("not ready", [pod("worker", 0), pod("worker", 1, ready=False)], {}, "waiting for workers: 1 of 2 are ready"),
    (
        "no such priority class", [],
        {
            "mpijob": mpijob(30, conditions=[]),
            "events": [event(JOB, "MPIJobFailed", 'worker pod created failed: pods "x" is forbidden: no class')],
        },
        'no pod can be made: pods "x" is forbidden: no class',
    ),
    (
        "a quota for pods", [],
        {"events": [event(JOB, "MPIJobFailed", 'worker pod created failed: pods "x" is forbidden: exceeded quota: q')]},
        'no pod can be made: pods "x" is forbidden: exceeded quota',
    ),
    ("no launcher yet", [*WORKERS], {}, "the operator creates the launcher pod"),
    ("starting", [*WORKERS, LAUNCHER], {}, "starting: the launcher pod runs, its attempt has not begun"),
    (
        "the launcher has no place", [*WORKERS, pod("launcher", **unschedulable(SCHEDULER))], {},
        "the launcher pod cannot be scheduled: 0/2 nodes",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("pods", "view", "words"), [case[1:] for case in WAITING], ids=[case[0] for case in WAITING])
def test_why_it_waits(pods: list[Object], view: dict[str, Any], words: str) -> None:
    how = reported([SUBMIT], pods, **view)
    assert how.state is State.PENDING
    assert words in (how.waits or "")
    again = reported([SUBMIT, START, END], pods, **view)
    assert again.state is State.RESTARTING
    assert words in (again.waits or "")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            "0/2 nodes are available: 2 Insufficient memory. no new claims to deallocate, preemption: 0/2 nodes are "
            "available: 2 Preemption is not helpful for scheduling.",
            "0/2 nodes are available: 2 Insufficient memory … lower … resources … wait",
        ),
        (
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims. not found",
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims; … `kubectl get pvc`",
        ),
        ("0/3 nodes are available: 3 node(s) were odd.", "0/3 nodes are available: 3 node(s) were odd"),
    ],
)
def test_the_schedulers_own_sentence(message: str, words: str) -> None:
    assert says(scheduler_reason(message), words)


def test_suspended_by_a_person_or_a_queue() -> None:
    assert mentions(
        reported([SUBMIT], [], mpijob=mpijob(suspend=True)).waits or "",
        "suspended",
        "`ortflow resume kubernetes://default/digits-abc123`",
    )
    queued = mpijob(suspend=True)
    queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    assert reported([SUBMIT], [], mpijob=queued).waits == "waits for quota in queue team"
    words = (
        "couldn't assign flavors to pod set worker: insufficient unused quota for cpu in flavor default, 2 more needed"
    )
    workload = {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": words}]}}
    how = reported([SUBMIT], [], mpijob=queued, workload=workload)
    assert (how.state, how.waits) == (State.PENDING, f"waits for quota in queue team: {words}")
    assert reported([SUBMIT, START, END], [], mpijob=queued).state is State.RESTARTING


def test_a_worker_is_replaced() -> None:
    disrupted = [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
        }
    ]
    leaving = pod("worker", 1, deleted=NOW + 30, conditions=disrupted)
    how = reported([SUBMIT, START], [pod("worker", 0), leaving, LAUNCHER])
    assert how.state is State.RESTARTING
    assert mentions(how.waits or "", "worker 1", "evicted")
    assert how.phase is None


def test_a_lost_node_and_a_dead_worker() -> None:
    lost = reported([SUBMIT, START], [pod("worker", 0), pod("worker", 1, node="n2", deleted=NOW - 20), LAUNCHER])
    assert mentions(lost.waits or "", "20 s", "n2", "`ortflow supervise`")
    evicted = pod("worker", 1, phase="Failed", ready=False, reason="Evicted", message="The node was low on resource")
    how = reported([SUBMIT, START], [pod("worker", 0), evicted, LAUNCHER])
    assert mentions(how.waits or "", "worker 1 is dead", "disk or memory")


def test_the_launcher_pod_is_tried_again() -> None:
    ended = pod("launcher", phase="Failed", ready=False, state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    how = reported([SUBMIT, START], [*WORKERS, ended], job=batch_job(failed=2))
    assert how.state is State.RESTARTING
    assert mentions(how.waits or "", "out of memory", "resources.memory")
    assert "2 of 10 retries are used" in (how.waits or "")
    assert how.job_restarts == 2


def test_advice_names_the_launchers_own_resources() -> None:
    """It requests launcher_resources, unless ranks run in it."""
    ended = pod("launcher", phase="Failed", ready=False, state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    resources = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    ended["spec"]["containers"][0]["resources"] = resources
    how = reported([SUBMIT, START], [*WORKERS, ended], job=batch_job(failed=2))
    assert "(out of memory; raise backends.kubernetes.launcher_resources.memory)" in (how.waits or "")
    waiting = pod("launcher", **unschedulable(SCHEDULER))
    waiting["spec"]["containers"][0]["resources"] = resources
    words = "2 Insufficient cpu … lower … backends.kubernetes.launcher_resources"
    assert mentions(reported([SUBMIT], [*WORKERS, waiting]).waits or "", words)
    ended["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "2"}, "limits": {"cpu": "2"}}
    assert "raise resources.memory" in (reported([SUBMIT, START], [*WORKERS, ended], job=batch_job()).waits or "")


def test_failed_without_an_end_is_not_an_end() -> None:
    failed = mpijob(
        conditions=[("Created", "True", "", ""), ("Failed", "True", "MPIJobEvicted", "1/2 workers evicted")]
    )
    assert reported([SUBMIT, START], [*WORKERS, LAUNCHER], mpijob=failed).state is State.RUNNING
    over = mpijob(
        conditions=[("Failed", "True", "BackoffLimitExceeded", "Job has reached the specified backoff limit")],
        completionTime=stamp(NOW),
    )
    how = reported([SUBMIT, START], [pod("launcher", phase="Failed", ready=False)], mpijob=over)
    assert how.state is State.LOST
    assert mentions(how.cause, "gave up", "backoff limit", "launcher pod:")  # type: ignore[operator]


def test_a_deadline() -> None:
    over = mpijob(conditions=[("Failed", "True", "DeadlineExceeded", "was active")], completionTime=stamp(NOW))
    assert "its deadline has passed" in (reported([SUBMIT, START], [], mpijob=over).cause or "")


def test_succeeded_before_its_last_lines_came() -> None:
    done = mpijob(conditions=[("Succeeded", "True", "MPIJobSucceeded", "")], completionTime=stamp(NOW))
    assert reported([SUBMIT, START], [], mpijob=done).state is State.FINISHED
    how = reported([SUBMIT, START, {**END, "why": "preemption 1"}, {**START, "attempt": 1}], [], mpijob=done)
    assert (how.state, how.why) == (State.FINISHED, None), "the last end went with its pod's log"
    assert mentions(how.cause or "", "finished", "log", "deleted", "backends.kubernetes.time_to_live", "volume")
    how = reported([SUBMIT], [pod("launcher", phase="Succeeded")], mpijob=done)
    assert (how.state, how.cause) == (State.FINISHED, "finished")


def test_pods_that_were_left_without_their_mpijob() -> None:
    """`kubectl delete mpijob --cascade=orphan`: the ranks train on."""
    how = reported([SUBMIT, START], [*WORKERS, LAUNCHER], mpijob=None)
    assert how.state is State.RUNNING
    assert mentions(how.waits or "", "MPIJob was deleted", "3 pods", "`ortflow cancel`")
    owner = {"kind": "MPIJob", "name": JOB}
    about_to_go = [{**one, "metadata": {**one["metadata"], "ownerReferences": [owner]}} for one in [*WORKERS, LAUNCHER]]
    assert reported([SUBMIT, START], about_to_go, mpijob=None).state is State.CANCELLED
    going = [pod("launcher", deleted=NOW + 5), pod("worker", phase="Succeeded")]
    assert reported([SUBMIT, START], going, mpijob=None).state is State.CANCELLED


def test_finished_and_deleted_before_anybody_read_its_log() -> None:
    """As with a short time_to_live: the records know no attempt."""
    done = mpijob(conditions=[("Succeeded", "True", "MPIJobSucceeded", "")], completionTime=stamp(NOW))
    how = reported([SUBMIT], [], mpijob=done)
    assert how.state is State.FINISHED
    assert mentions(how.cause or "", "log … deleted … time_to_live … on the volume")
    assert "started" not in str(_no_log(RunDir(Path("/nowhere")), how))


def test_what_the_operator_refuses() -> None:
    words = 'Found validation errors: spec.runPolicy.cleanPodPolicy: Unsupported value: "Sometimes"'
    how = reported([SUBMIT], [], mpijob=mpijob(conditions=[]), events=[event(JOB, "ValidationError", words)])
    assert how.state is State.FAILED
    assert mentions(how.cause, "spec.runPolicy.cleanPodPolicy", '"Sometimes"')


def test_wrong_input_that_never_came_to_a_run_directory() -> None:
    output = {"terminated": {"exitCode": 2, "message": "model.path: there is no file /ortflow/files/digits/m.onnx"}}
    ended = pod("launcher", phase="Failed", ready=False, state=output)
    how = reported([SUBMIT], [*WORKERS, ended], job=batch_job(failed=1))
    assert (how.state, how.cause) == (State.FAILED, "model.path: there is no file /ortflow/files/digits/m.onnx")
    for now in (pod("launcher", 1, phase="Pending", ready=False), pod("launcher", 1)):
        again = reported([SUBMIT], [*WORKERS, ended, now], job=batch_job(failed=1))
        assert (again.state, again.cause) == (how.state, how.cause), "whatever the operator does next"
    assert reported([SUBMIT, START], [*WORKERS, ended, pod("launcher", 1)]).state is State.RUNNING
    resumed = [SUBMIT, START, {"event": "end", "attempt": 0, "outcome": "preempted", "next": "restart"}, SUBMIT]
    assert reported(resumed, [*WORKERS, ended, pod("launcher", 1)]).state is State.FAILED


def test_deleted() -> None:
    how = reported([SUBMIT, START], [], mpijob=None)
    assert (how.state, how.cause) == (State.CANCELLED, f"MPIJob {JOB} no longer exists: it was deleted")
    going = mpijob()
    going["metadata"]["deletionTimestamp"] = stamp(NOW)
    assert "being deleted" in reported([SUBMIT, START], [LAUNCHER], mpijob=going).waits


def test_the_records_take_precedence() -> None:
    done = [SUBMIT, START, {"event": "end", "attempt": 0, "outcome": "finished", "next": "stop"}]
    assert reported(done, [], mpijob=None).state is State.FINISHED
    stopped = [SUBMIT, START, {"event": "stop", "outcome": "preempted", "asked": "cancel"}]
    assert reported(stopped, [*WORKERS, LAUNCHER]).state is State.CANCELLED
