"""Messages for why a pod does not run, or has ended. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Object

_BESIDE = re.compile(r"\.? (?:no new claims to deallocate,? ?)?(?:preemption: |not found$)|\.$")
"""Where the scheduler's message turns to preemption."""
_PULL = ("ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable")
_CREATE = ("CreateContainerError", "RunContainerError", "CreateContainerConfigError", "StartError", "PreStartHookError")
WRONG = (*_PULL, *_CREATE, "ErrImageNeverPull", "InvalidImageName", "CrashLoopBackOff")
"""Reasons of a waiting container that do not pass by themselves."""
PULL_FIX = "; correct backends.kubernetes.image or image_pull_secrets"
_HINTS = (
    (r"Insufficient nvidia\.com|Insufficient amd\.com", "lower resources.ranks_per_node, or wait for GPUs"),
    (r"Insufficient (?:cpu|memory|ephemeral-storage)", "lower what {resources} asks for, or wait for room"),
    (r"untolerated taint", "give backends.kubernetes.tolerations"),
    (r"node affinity/selector|node selector", "correct backends.kubernetes.node_selector or affinity"),
    (
        r'persistentvolumeclaim "[^"]*-data"',
        "`ortflow render -b kubernetes --with-claim RUN_FILE | kubectl apply -f -` makes the claim of volume.create",
    ),
    (r"unbound immediate PersistentVolumeClaims|persistentvolumeclaim", "check the claim with `kubectl get pvc`"),
    (r"topology spread", "set backends.kubernetes.spread: prefer, or ask for fewer nodes"),
)
_TAKEN = {
    "PreemptionByScheduler": "preempted by a pod of a higher priority",
    "PreemptionByKubeScheduler": "preempted by a pod of a higher priority",
    "DeletionByTaintManager": "its node was tainted or lost",
    "EvictionByEvictionAPI": "evicted: its node is drained, or by request",
    "DeletionByPodGC": "its node is gone",
    "TerminationByKubelet": "its node had too little disk or memory, or was shut down",
    "WorkloadEvictedDueToPreempted": "preempted in its queue",
    "WorkloadEvictedDueToPreemption": "preempted in its queue",
    "WorkloadEvictedDueToPodsReadyTimeout": "evicted by its queue: its pods were not ready in time",
    "WorkloadEvictedDueToAdmissionCheck": "evicted by its queue: an admission check withdrew its consent",
    "WorkloadEvictedDueToClusterQueueStopped": "evicted by its queue, which was stopped",
    "WorkloadEvictedDueToLocalQueueStopped": "evicted by its queue, which was stopped",
    "WorkloadEvictedDueToDeactivated": "evicted by its queue: its workload was deactivated",
    "Evicted": "its node had too little disk or memory",
}


def fault_of(pod: Object, events: Sequence[Object], excluded: Sequence[str] = ()) -> str | None:
    """Why a pod that is not being deleted does not work; None if it works or has ended.

    `excluded`: the nodes that it may not be on.
    """
    scheduled = objects.condition(pod, "PodScheduled")
    if objects.phase(pod) == "Pending" and scheduled is not None and scheduled.get("status") == "False":
        if scheduled.get("reason") == "SchedulingGated":
            return "is held back by a scheduling gate, as of a queue"
        message = str(scheduled.get("message") or "the scheduler gives no reason")
        if excluded and scheduled.get("reason") == "Unschedulable" and "affinity/selector" in message:
            return _no_other_node(excluded, message)
        return f"cannot be scheduled: {scheduler_reason(message, _resources(pod))}"
    if objects.phase(pod) == "Pending" and scheduled is None:
        scheduler = (pod.get("spec") or {}).get("schedulerName") or "default-scheduler"
        return f"is not scheduled yet by {scheduler}"
    own_events = objects.events_of(events, objects.name(pod))
    main = objects.main_container(pod)
    waiting = (main.get("state") or {}).get("waiting")
    if objects.phase(pod) == "Pending" and (waiting or {}).get("reason") not in WRONG:
        for other in objects.beside_main(pod):
            waiting_state = (other.get("state") or {}).get("waiting") or {}
            if waiting_state.get("reason") in WRONG:
                return f"has a container {other.get('name')} beside ortflow's, which {_waiting(pod, other, own_events)}"
    if waiting:
        return _waiting(pod, main, own_events)
    if objects.phase(pod) == "Pending":
        return _creating(own_events)
    return None


def _resources(pod: Object) -> str:
    """The section of the run file with a pod's resources."""
    return "resources" if objects.holds_ranks(pod) else "backends.kubernetes.launcher_resources"


def _no_other_node(excluded: Sequence[str], message: str) -> str:
    # The scheduler counts the excluded nodes as those that "didn't match Pod's node affinity/selector".
    return (
        f"has no node: no other node has room, and {', '.join(excluded)} {'is' if len(excluded) == 1 else 'are'} "
        f"excluded ({_plain_reason(message)}); add a node, or cancel the run and resume it to admit all nodes again"
    )


def scheduler_reason(message: str, resources: str = "resources") -> str:
    """The scheduler's own message without its part on preemption, and a fix.

    `resources` is the section with the pod's resources.
    """
    text = _plain_reason(message)
    hint = next((fix for pattern, fix in _HINTS if re.search(pattern, text)), None)
    return f"{text}; {hint.replace('{resources}', resources)}" if hint else text


def _plain_reason(message: str) -> str:
    return _BESIDE.split(" ".join(message.split()))[0]


def _waiting(pod: Object, container: Object, own_events: Sequence[Object]) -> str:
    """Why a container waits, from its status."""
    waiting = container["state"]["waiting"]
    reason, message = str(waiting.get("reason") or ""), " ".join(str(waiting.get("message") or "").split())
    is_main = container.get("name") == objects.container_name(pod)
    image = objects.container_of(pod).get("image") if is_main else container.get("image")
    if reason in _PULL:
        messages = [str(event.get("message")) for event in own_events if event.get("reason") == "Failed"]
        message_text = next((line for line in reversed(messages) if "Failed to pull image" in line), message)
        message_text = " ".join(message_text.split()).removeprefix(f'Failed to pull image "{image}": ')
        return f"cannot pull the image {image}: {message_text}" + (PULL_FIX if is_main else "")
    if reason == "ErrImageNeverPull":
        return f"has no image {image} on its node, and backends.kubernetes.image_pull_policy is Never"
    if reason == "InvalidImageName":
        return f"cannot pull the image {image}: this is not a valid image name; correct backends.kubernetes.image"
    if reason in _CREATE:
        return f"cannot be started: {message or reason}"
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        return f"keeps ending: {_end_message(last, pod)}"
    return _creating(own_events)


def _creating(own_events: Sequence[Object]) -> str:
    """A container that is being created: its newest event."""
    for event in reversed(own_events):
        reason, message = str(event.get("reason") or ""), " ".join(str(event.get("message") or "").split())
        if "failed to sync" in message:
            continue  # the kubelet has not received it yet
        if reason in ("FailedMount", "FailedAttachVolume", "FailedMapVolume"):
            return f"waits for a volume: {message}"
        if reason == "FailedCreatePodSandBox":
            return f"has no network yet: {message}"
        if reason == "Pulling":
            return "is pulling its image"
        if reason in ("Pulled", "Created", "Started"):
            break
    return "is being prepared"


def _end_message(ended: Object, pod: Object) -> str:
    if ended.get("reason") == "OOMKilled":
        return f"out of memory; raise {_resources(pod)}.memory"
    message = " ".join(str(ended.get("message") or "").split())
    code = f"exit code {ended.get('exitCode')}"
    return f"{message} ({code})" if message else code


def end_reason(pod: Object) -> str:
    """Why a pod has ended or is being deleted."""
    if disruption := objects.disrupted(pod):
        message = (pod.get("status") or {}).get("message")
        return _TAKEN.get(disruption, disruption) + (f": {message}" if message else "")
    ended = (objects.main_container(pod).get("state") or {}).get("terminated")
    if ended:
        return _end_message(ended, pod)
    return "deleted" if objects.deleted_at(pod) is not None else objects.phase(pod).lower()


def reported_end(pod: Object) -> tuple[int | None, str]:
    """Exit code, and the container's termination message."""
    ended = (objects.main_container(pod).get("state") or {}).get("terminated") or {}
    return ended.get("exitCode"), " ".join(str(ended.get("message") or "").split())
