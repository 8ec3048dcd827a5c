"""Which pods a ResourceQuota counts: those of all its scopes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortflow.launchers.kubernetes.api import Object


def counts(quota: Object, pod: Object, ranges: Sequence[Object]) -> bool | None:
    """Whether a quota counts a pod of this spec in a namespace with these limit ranges; None if that is unknown.

    It is where the scope is by a priority class that the cluster may give to the pod, or one that is not known here.
    """
    spec = quota.get("spec") or {}
    conditions = [(scope, "Exists", ()) for scope in spec.get("scopes") or []]
    conditions += [
        (item["scopeName"], item.get("operator", "Exists"), item.get("values") or ())
        for item in (spec.get("scopeSelector") or {}).get("matchExpressions") or []
    ]
    scopes = [_matches(*condition, pod, ranges) for condition in conditions]
    if False in scopes:
        return False
    return None if None in scopes else True


def _matches(scope: str, operator: str, values: Sequence[str], pod: Object, ranges: Sequence[Object]) -> bool | None:
    if scope == "PriorityClass":
        return _has_priority(pod.get("priorityClassName"), operator, values)
    if operator != "Exists":
        return None
    if scope in ("BestEffort", "NotBestEffort"):
        return _is_best_effort(pod, ranges) == (scope == "BestEffort")
    if scope in ("Terminating", "NotTerminating"):
        return (pod.get("activeDeadlineSeconds") is not None) == (scope == "Terminating")
    if scope == "CrossNamespacePodAffinity":
        return any("namespaces" in term or "namespaceSelector" in term for term in _affinity_terms(pod))
    return None


def _has_priority(name: str | None, operator: str, values: Sequence[str]) -> bool | None:
    if not name:  # a cluster may have a default class
        return None
    return {
        "In": name in values, "NotIn": name not in values, "Exists": True, "DoesNotExist": False,
    }.get(operator)  # fmt: skip


def _is_best_effort(pod: Object, ranges: Sequence[Object]) -> bool:
    """Whether no container states cpu or memory, and no limit range does it for them."""
    stated = [
        (container.get("resources") or {}).get(kind)
        for container in [*(pod.get("initContainers") or []), *pod["containers"]]
        for kind in ("requests", "limits")
    ]
    stated += [
        item.get(kind)
        for limit_range in ranges
        for item in (limit_range.get("spec") or {}).get("limits") or []
        if item.get("type") == "Container"
        for kind in ("default", "defaultRequest")
    ]
    return not any({"cpu", "memory"} & (amounts or {}).keys() for amounts in stated)


def _affinity_terms(pod: Object) -> Iterator[Object]:
    affinity = pod.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        rules = affinity.get(kind) or {}
        yield from rules.get("requiredDuringSchedulingIgnoredDuringExecution") or []
        for preferred in rules.get("preferredDuringSchedulingIgnoredDuringExecution") or []:
            yield preferred["podAffinityTerm"]
