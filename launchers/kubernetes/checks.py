"""What the doctor concludes from the objects of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ortflow.launchers.findings import Finding, Level, fault, ok, untested, warning
from ortflow.launchers.kubernetes import objects
from ortflow.launchers.kubernetes.api import Object
from ortflow.launchers.kubernetes.quantity import parse, show
from ortflow.launchers.kubernetes.quota_scopes import counts
from ortflow.launchers.kubernetes.refusals import keys_that_state
from ortflow.launchers.view.lines import duration

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
STALE = 60.0
"""Seconds since its lease was renewed after which an operator counts as not running."""
MANY = ("ReadWriteMany",)


def worker_asks(mpijob: Object) -> dict[str, float]:
    """What one worker requests; the launcher's if it is the only pod with ranks."""
    replicas = mpijob["spec"]["mpiReplicaSpecs"]
    template = (replicas.get("Worker") or replicas["Launcher"])["template"]["spec"]
    return _asks(template)


def all_asks(pods: Iterable[tuple[Object, int]]) -> dict[str, float]:
    """What these pods request, as quotas count it."""
    total: dict[str, float] = {"pods": 0.0}
    for spec, count in pods:
        total["pods"] += count
        for kind in ("requests", "limits"):
            for resource, amount in _asks(spec, kind).items():
                key = f"{kind}.{resource}"
                total[key] = total.get(key, 0.0) + count * amount
                if kind == "requests" and resource in ("cpu", "memory"):
                    total[resource] = total.get(resource, 0.0) + count * amount
    return total


def pod_specs(documents: Sequence[Object]) -> Iterator[tuple[Object, int]]:
    """The pods that controllers create for the documents, and how many of each."""
    for document in documents:
        spec = document.get("spec") or {}
        for replica in [*(spec.get("mpiReplicaSpecs") or {}).values(), *([spec] if "template" in spec else [])]:
            yield replica["template"]["spec"], int(replica.get("replicas", 1))


def unstated(pods: Iterable[tuple[Object, int]], ranges: Sequence[Object]) -> dict[str, list[str]]:
    """The containers of these pods that do not state a resource that a quota may require, by that resource.

    Limit ranges of the namespace fill in some.
    """
    filled = {
        f"{kind}.{resource}"
        for limit_range in ranges
        for item in (limit_range.get("spec") or {}).get("limits") or []
        if item.get("type") == "Container"
        for kind, keys in (("limits", ("default",)), ("requests", ("defaultRequest", "default")))
        for key in keys
        for resource in item.get(key) or {}
    }
    containers: dict[str, list[str]] = {}
    for spec, _ in pods:
        for container in [*(spec.get("initContainers") or []), *spec["containers"]]:
            resources = container.get("resources") or {}
            for kind in ("requests", "limits"):
                # The API server takes a missing request from the limit.
                stated = {
                    *(resources.get(kind) or {}),
                    *((resources.get("limits") or {}) if kind == "requests" else ()),
                }
                for resource in ("cpu", "memory"):
                    if resource not in stated and f"{kind}.{resource}" not in filled:
                        for key in (f"{kind}.{resource}", *([resource] if kind == "requests" else [])):
                            containers.setdefault(key, []).append(str(container["name"]))
    return containers


def _asks(spec: Object, kind: str = "requests") -> dict[str, float]:
    amounts: dict[str, float] = {}
    for container in spec["containers"]:
        for resource, amount in ((container.get("resources") or {}).get(kind) or {}).items():
            amounts[resource] = amounts.get(resource, 0.0) + parse(amount)
    return amounts


def operator(leases: Sequence[Object], now: float) -> Finding:
    """Whether an mpi-operator runs: it renews a lease every few seconds.

    Times in the lease are by the operator's clock; its last write and `now` are by the API server's.
    """
    about = "operator"
    renewed = [(objects.changed(lease_item), lease_item) for lease_item in leases]
    if not renewed:
        return fault(about, "no mpi-operator has ever run here", "have an administrator install it: docs/kubernetes.md")
    newest, lease = max(renewed, key=lambda pair: pair[0])
    namespace = lease["metadata"].get("namespace")
    if now - newest > STALE:
        return fault(
            about, f"the mpi-operator of {namespace} does not run: its lease was renewed {duration(now - newest)} ago",
            f"`kubectl -n {namespace} get pods` shows why",
        )  # fmt: skip
    return ok(about, f"runs in namespace {namespace}, as {lease['spec'].get('holderIdentity')}")


def quotas(quota_items: Sequence[Object], documents: Sequence[Object], ranges: Sequence[Object]) -> Iterator[Finding]:
    """Whether the pods of the run fit into those quotas of the namespace that count them; `ranges` are its limits."""
    about = "quota"
    if not quota_items:
        yield ok(about, "the namespace has none")
    for quota in quota_items:
        pods = [(counts(quota, spec, ranges), (spec, count)) for spec, count in pod_specs(documents)]
        counted = [pod for sure, pod in pods if sure]
        finding = _quota(quota, counted, ranges)
        if finding.level is Level.OK and None in (sure for sure, _ in pods):
            possible = _quota(quota, [pod for sure, pod in pods if sure is not False], ranges)
            if possible.level is not Level.OK:
                text = "it depends on its scopes whether it counts the run, and if it does"
                finding = untested(about, f"{objects.name(quota)}: {text}, {possible.what}")
        yield finding


def _quota(quota: Object, pods: Sequence[tuple[Object, int]], ranges: Sequence[Object]) -> Finding:
    about, name = "quota", objects.name(quota)
    if not pods:
        return ok(about, f"{name} does not count the run's pods")
    requests, lacking = all_asks(pods), unstated(pods, ranges)
    status = quota.get("status") or {}
    hard, used = status.get("hard") or (quota.get("spec") or {}).get("hard") or {}, status.get("used") or {}
    never, full = [], []
    for resource, limit in hard.items():
        need, most = requests.get(resource, 0.0), parse(limit)
        amount = f"{resource} {show(resource, need)} of {show(resource, most)}"
        if need > most:
            never.append(amount)
        elif need > most - parse(used.get(resource, 0)):
            full.append(f"{amount}, {show(resource, parse(used.get(resource, 0)))} in use")
    if absent := {resource: [*lacking[resource]] for resource in hard if resource in lacking}:
        resources_text = "; ".join(f"{resource} of {', '.join(sorted(names))}" for resource, names in absent.items())
        fix = "give " + " and ".join(keys_that_state((key, name) for key, names in absent.items() for name in names))
        text = f"{name} requires every container to state what it limits, and there is no {resources_text}"
        return fault(about, text, fix)
    if never:
        return fault(about, f"{name} is too small for the run: {'; '.join(never)}", "lower what resources asks for")
    if full:
        return warning(about, f"{name} has no room for the run now: {'; '.join(full)}")
    return ok(about, f"{name} has room for the run")


def fits(nodes: Sequence[Object], spec: Object, worker_count: int, asks: Mapping[str, float]) -> Iterator[Finding]:
    """Whether empty nodes could hold the workers; `spec` is a worker pod's."""
    about = "nodes"
    need = (
        ", ".join(f"{resource} {show(resource, amount)}" for resource, amount in asks.items()) or "no specific resource"
    )
    reasons: dict[str, int] = {}
    holds = []
    for node in nodes:
        if (reason := _unfit(node, spec, asks)) is None:
            holds.append(objects.name(node))
        else:
            reasons[reason] = reasons.get(reason, 0) + 1
    reasons_text = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    if not holds:
        yield fault(about, f"none of {len(nodes)} can hold a worker ({need}): {reasons_text or 'there are none'}")
        return
    text = f"{len(holds)} of {len(nodes)} can hold a worker ({need})" + (f": {reasons_text}" if reasons_text else "")
    if len(holds) < worker_count:
        strict = any(
            constraint.get("whenUnsatisfiable") == "DoNotSchedule"
            for constraint in spec.get("topologySpreadConstraints") or []
        )
        make = fault if strict else warning
        yield make(about, f"{text}, and the run has {worker_count}", "workers will share nodes" if not strict else "")
    else:
        yield ok(about, text)


def _unfit(node: Object, spec: Object, asks: Mapping[str, float]) -> str | None:
    if not objects.holds(node, "Ready"):
        return "not ready"
    if (node.get("spec") or {}).get("unschedulable"):
        return "cordoned"
    labels = node["metadata"].get("labels") or {}
    missing_labels = {key: value for key, value in (spec.get("nodeSelector") or {}).items() if labels.get(key) != value}
    if missing_labels:
        return f"without the label {' and '.join(f'{key}={value}' for key, value in sorted(missing_labels.items()))}"
    for taint in (node.get("spec") or {}).get("taints") or []:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not _tolerated(taint, spec.get("tolerations") or []):
            return f"with the taint {taint.get('key')}"
    room = (node.get("status") or {}).get("allocatable") or {}
    for resource, amount in asks.items():
        if parse(room.get(resource, 0)) < amount:
            return f"with {show(resource, parse(room.get(resource, 0)))} of {resource}"
    return None


def _tolerated(taint: Object, tolerations: Sequence[Object]) -> bool:
    for toleration in tolerations:
        # An empty effect matches every effect, and an empty key with Exists every taint.
        if toleration.get("effect") not in (None, "", taint.get("effect")):
            continue
        if toleration.get("operator") == "Exists" and toleration.get("key") in (None, "", taint.get("key")):
            return True
        if toleration.get("key") == taint.get("key") and (toleration.get("value") or "") == (taint.get("value") or ""):
            return True
    return False


def claim(claim_object: Object | None, name: str, nodes: int) -> Finding:
    """A claim that the run uses."""
    about = "volume"
    if claim_object is None:
        return fault(about, f"there is no claim {name}", "correct backends.kubernetes.volume.claim, or make it")
    modes = (claim_object.get("spec") or {}).get("accessModes") or []
    state = (claim_object.get("status") or {}).get("phase")
    text = f"claim {name}, {str(state).lower()}, {', '.join(modes)}"
    if state == "Lost":
        return fault(about, f"{text}: its volume is gone")
    if nodes > 1 and not set(MANY) & set(modes):
        return warning(about, f"{text}: pods on several nodes cannot share it", "use one that is ReadWriteMany")
    return ok(about, text)


def storage_class(classes: Sequence[Object], class_name: str | None) -> Finding:
    """The storage class of a claim."""
    about = "storage class"
    names = [objects.name(storage) for storage in classes]
    if class_name is not None:
        if class_name in names:
            return ok(about, class_name)
        return fault(about, f"there is no {class_name}", f"there are: {', '.join(names) or 'none'}")
    for storage in classes:
        if (storage["metadata"].get("annotations") or {}).get(DEFAULT_CLASS) == "true":
            return ok(about, f"{objects.name(storage)}, the default")
    return fault(
        about,
        "the cluster has no default one",
        f"give backends.kubernetes.volume.create.storage_class: {', '.join(names)}",
    )


def rights(answers: Mapping[str, bool], useful: Mapping[str, bool]) -> Iterator[Finding]:
    """The rights of these credentials; `useful`: rights that a run does not need."""
    about = "rights"
    missing = [right for right, may in answers.items() if not may]
    lesser = [right for right, may in useful.items() if not may]
    if missing:
        yield fault(about, f"you may not {', '.join(missing)}", "ask an administrator for a role that allows it")
    else:
        yield ok(about, f"all {len(answers)} that a run needs")
    if lesser:
        yield warning(
            about,
            f"you may not {', '.join(lesser)}",
            "without it status shows less, and supervise cannot replace lost pods",
        )


def documents_ask(documents: Sequence[Object]) -> list[tuple[str, str, str]]:
    """Verb, group and resource of each object that is created for the run."""
    from ortflow.launchers.kubernetes.resources import plural

    asks: dict[tuple[str, str, str], Any] = {}
    for document in documents:
        group = str(document["apiVersion"]).rpartition("/")[0]
        verbs = ("create",) if document["kind"] == "PersistentVolumeClaim" else ("create", "patch", "delete")
        for verb in verbs:
            asks[verb, group, plural(str(document["kind"]))] = None
    return list(asks)
