"""What the API server would refuse of a pod, beyond the types of its fields; and what would never start. Pure.

Called for what a run file writes as Kubernetes does, and for whole pods with overlays on them. A problem's path is
that in the pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ortflow.workflow.spec.checks.kubernetes_shapes import SOURCES
from ortflow.workflow.spec.checks.kubernetes_syntax import QUANTITY, VARIABLE, is_qualified
from ortflow.workflow.spec.problem import KeyPath, Problem

Native = dict[str, Any]
_AMOUNT = re.compile(r"([0-9.]+)([a-zA-Z]*)(.*)")
_UNITS = {
    "": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60,
}  # fmt: skip


def check_pod(pod: Native, path: KeyPath) -> Iterator[Problem]:
    """Faults of a pod whose fields have the right types."""
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    if not pod["containers"]:
        yield Problem((*path, "containers"), "has no container")
    yield from _unique([container["name"] for container in containers], (*path, "containers"), "container")
    volumes = pod.get("volumes", [])
    for key in pod.get("nodeSelector", {}):
        if not is_qualified(key):
            yield Problem((*path, "nodeSelector", key), "is not a name of a label")
    for place, volume in enumerate(volumes):
        yield from check_source({key: volume[key] for key in volume if key != "name"}, (*path, "volumes", place))
    yield from _unique([volume["name"] for volume in volumes], (*path, "volumes"), "volume")
    known = {volume["name"] for volume in volumes}
    for kind in ("initContainers", "containers"):
        for place, container in enumerate(pod.get(kind, ())):
            yield from _container(container, pod, known, (*path, kind, place))
    for place, toleration in enumerate(pod.get("tolerations", ())):
        yield from check_toleration(toleration, (*path, "tolerations", place))
    yield from check_spread(pod.get("topologySpreadConstraints", ()), (*path, "topologySpreadConstraints"))
    yield from check_affinity(pod.get("affinity", {}), (*path, "affinity"))
    yield from _security(pod.get("securityContext", {}), {}, (*path, "securityContext"))
    if pod.get("dnsPolicy") == "None" and not pod.get("dnsConfig", {}).get("nameservers"):
        yield Problem((*path, "dnsConfig", "nameservers"), "is missing, and dnsPolicy is None")
    if pod.get("hostPID") and pod.get("shareProcessNamespace"):
        yield Problem((*path, "shareProcessNamespace"), "cannot be combined with hostPID")
    for key in ("hostPID", "hostIPC", "hostNetwork"):
        if pod.get(key) and pod.get("hostUsers") is False:
            yield Problem((*path, key), "is true, and hostUsers is false")


def check_source(source: Native, path: KeyPath) -> Iterator[Problem]:
    """A volume's source: exactly one."""
    if len(source) != 1:
        what = "has no source" if not source else f"has several sources: {', '.join(source)}"
        yield Problem(path, what, f"give one of {', '.join(SOURCES)}")
    for kind in source:
        if kind not in SOURCES:
            yield Problem((*path, kind), "is not a source of a volume", f"give one of {', '.join(SOURCES)}")


def check_toleration(toleration: Native, path: KeyPath) -> Iterator[Problem]:
    """One toleration."""
    exists = toleration.get("operator") == "Exists"
    if exists and toleration.get("value"):
        yield Problem((*path, "value"), "is given, and the operator is Exists", "take it away")
    if not toleration.get("key") and not exists:
        yield Problem((*path, "operator"), "must be Exists where no key is given")
    if "tolerationSeconds" in toleration and toleration.get("effect") != "NoExecute":
        yield Problem((*path, "tolerationSeconds"), "needs the effect NoExecute")


def check_spread(constraints: Sequence[Native], path: KeyPath) -> Iterator[Problem]:
    """Constraints on where pods are placed."""
    seen: set[tuple[str, str]] = set()
    for place, constraint in enumerate(constraints):
        where = (constraint["topologyKey"], constraint["whenUnsatisfiable"])
        if where in seen:
            yield Problem((*path, place), f"constrains {where[0]} with {where[1]} a second time")
        seen.add(where)
        if "minDomains" in constraint and where[1] != "DoNotSchedule":
            yield Problem((*path, place, "minDomains"), "needs whenUnsatisfiable DoNotSchedule")
        yield from _term(constraint, (*path, place))


def check_affinity(affinity: Native, path: KeyPath) -> Iterator[Problem]:
    """Affinity to nodes and to pods."""
    required, preferred = (f"{kind}DuringSchedulingIgnoredDuringExecution" for kind in ("required", "preferred"))
    node = affinity.get("nodeAffinity", {})
    terms: list[tuple[KeyPath, Native]] = []
    if required in node:
        here: KeyPath = (*path, "nodeAffinity", required, "nodeSelectorTerms")
        found = node[required]["nodeSelectorTerms"]
        if not found:
            yield Problem(here, "has no term")
        terms += [((*here, place), term) for place, term in enumerate(found)]
    for place, item in enumerate(node.get(preferred, ())):
        terms.append(((*path, "nodeAffinity", preferred, place, "preference"), item["preference"]))
    for where, term in terms:
        for place, expression in enumerate(term.get("matchExpressions", ())):
            yield from _expression(expression, (*where, "matchExpressions", place))
        for place, expression in enumerate(term.get("matchFields", ())):
            fits = expression["key"] == "metadata.name" and expression["operator"] in ("In", "NotIn")
            if not fits or len(expression.get("values", ())) != 1:
                yield Problem((*where, "matchFields", place), "must be metadata.name In or NotIn one value")
    for kind in ("podAffinity", "podAntiAffinity"):
        pods = affinity.get(kind, {})
        for place, term in enumerate(pods.get(required, ())):
            yield from _term(term, (*path, kind, required, place))
        for place, item in enumerate(pods.get(preferred, ())):
            yield from _term(item["podAffinityTerm"], (*path, kind, preferred, place, "podAffinityTerm"))


def _term(term: Native, path: KeyPath) -> Iterator[Problem]:
    """What chooses pods by their labels."""
    selector = term.get("labelSelector", {})
    chosen = {*selector.get("matchLabels", {}), *(one["key"] for one in selector.get("matchExpressions", ()))}
    for key in ("matchLabelKeys", "mismatchLabelKeys"):
        if term.get(key) and "labelSelector" not in term:
            yield Problem((*path, key), "needs a labelSelector")
        elif chosen & {*term.get(key, ())}:
            yield Problem((*path, key), "names a label that labelSelector also has")
    yield from _selector(selector, (*path, "labelSelector"))
    yield from _selector(term.get("namespaceSelector", {}), (*path, "namespaceSelector"))


def _selector(selector: Native, path: KeyPath) -> Iterator[Problem]:
    for key in selector.get("matchLabels", {}):
        if not is_qualified(key):
            yield Problem((*path, "matchLabels", key), "is not a name of a label")
    for place, expression in enumerate(selector.get("matchExpressions", ())):
        yield from _expression(expression, (*path, "matchExpressions", place))


def _expression(expression: Native, path: KeyPath) -> Iterator[Problem]:
    operator, values = expression["operator"], expression.get("values", [])
    if not is_qualified(expression["key"]):
        yield Problem((*path, "key"), "is not a name of a label")
    if operator in ("In", "NotIn") and not values:
        yield Problem((*path, "values"), f"is missing, and the operator is {operator}")
    elif operator in ("Exists", "DoesNotExist") and values:
        yield Problem((*path, "values"), f"is given, and the operator is {operator}", "take it away")
    elif operator in ("Gt", "Lt") and (len(values) != 1 or not re.fullmatch("-?[0-9]+", values[0])):
        yield Problem((*path, "values"), f"must be one whole number in quotes, because the operator is {operator}")


def _container(container: Native, pod: Native, volumes: set[str], path: KeyPath) -> Iterator[Problem]:
    if not container.get("image", "").strip() or container["image"] != container["image"].strip():
        yield Problem((*path, "image"), "is missing, or has spaces around it")
    for place, variable in enumerate(container.get("env", ())):
        yield from _variable(variable, (*path, "env", place))
    for place, source in enumerate(container.get("envFrom", ())):
        if ("configMapRef" in source) == ("secretRef" in source):
            yield Problem((*path, "envFrom", place), "must have one of configMapRef and secretRef")
    own = container.get("securityContext", {})
    yield from _mounts(container.get("volumeMounts", []), own, volumes, (*path, "volumeMounts"))
    yield from _ports(container.get("ports", ()), bool(pod.get("hostNetwork")), (*path, "ports"))
    yield from _resources(container.get("resources", {}), (*path, "resources"))
    for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
        if kind in container and "initContainers" in path and container.get("restartPolicy") != "Always":
            yield Problem((*path, kind), "is not allowed in an init container")
        elif kind in container:
            yield from _probe(container[kind], kind, (*path, kind))
    yield from _security(own, pod.get("securityContext", {}), (*path, "securityContext"))
    if own.get("procMount") == "Unmasked" and pod.get("hostUsers") is not False:
        yield Problem((*path, "securityContext", "procMount"), "needs hostUsers: false")


def _ports(ports: Sequence[Native], of_host: bool, path: KeyPath) -> Iterator[Problem]:
    yield from _unique([port["name"] for port in ports if "name" in port], path, "port")
    taken = [f"{port.get('protocol', 'TCP')} {port['hostPort']}" for port in ports if port.get("hostPort")]
    yield from _unique(taken, path, "port of the host")
    for place, port in enumerate(ports):
        if of_host and port.get("hostPort", port["containerPort"]) != port["containerPort"]:
            yield Problem((*path, place, "hostPort"), "must be the containerPort with hostNetwork")


def _mounts(mounts: Sequence[Native], security: Native, volumes: set[str], path: KeyPath) -> Iterator[Problem]:
    for place, mount in enumerate(mounts):
        if mount["name"] not in volumes:
            yield Problem((*path, place, "name"), f"is {mount['name']}, and there is no such volume")
        if ".." in mount.get("subPath", "").split("/") or mount.get("subPath", "").startswith("/"):
            yield Problem((*path, place, "subPath"), "leads out of the volume")
        if mount.get("mountPropagation") == "Bidirectional" and not security.get("privileged"):
            yield Problem((*path, place, "mountPropagation"), "is for privileged containers")
        if mount.get("recursiveReadOnly", "Disabled") != "Disabled" and not mount.get("readOnly"):
            yield Problem((*path, place, "recursiveReadOnly"), "needs readOnly: true")
    yield from _unique([mount["mountPath"] for mount in mounts], path, "mount at")


def _variable(variable: Native, path: KeyPath) -> Iterator[Problem]:
    if not VARIABLE.fullmatch(variable["name"]):
        yield Problem((*path, "name"), f"is not a name of a variable: {variable['name']!r}")
    if variable.get("value") and "valueFrom" in variable:
        yield Problem((*path, "valueFrom"), "cannot be combined with value")
    if "valueFrom" in variable:
        source = variable["valueFrom"]
        known = ("secretKeyRef", "configMapKeyRef", "fieldRef", "resourceFieldRef", "fileKeyRef")
        if not isinstance(source, dict) or len(source) != 1 or next(iter(source)) not in known:
            yield Problem((*path, "valueFrom"), "is not a source of a value", f"give one of {', '.join(known)}")


def _resources(resources: Native, path: KeyPath) -> Iterator[Problem]:
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for name, amount in {**requests, **limits}.items():
        where = (*path, "limits" if name in limits else "requests", name)
        own, pages = name in ("cpu", "memory", "ephemeral-storage"), name.partition("hugepages-")[2]
        if pages and not QUANTITY.fullmatch(pages):
            yield Problem(where, "is not a size of huge pages")
        elif not own and not pages and ("/" not in name or not is_qualified(name)):
            yield Problem(where, "is not a name of a resource")
        elif not own and (limits.get(name) is None or requests.get(name, amount) != limits[name]):
            yield Problem(where, "must be the same in requests and limits")
        elif not own and _amount(amount) % (_amount(pages) if pages else 1):
            yield Problem(where, f"must be a multiple of {pages}" if pages else "must be a whole number")
        elif name in requests and name in limits and _amount(requests[name]) > _amount(limits[name]):
            yield Problem((*path, "requests", name), f"is {requests[name]}, more than the limit of {limits[name]}")
    if any(name.startswith("hugepages-") for name in limits) and not {"cpu", "memory"} & {*requests, *limits}:
        yield Problem(path, "must have cpu or memory beside huge pages")


def _amount(quantity: str | int) -> float:
    match = _AMOUNT.fullmatch(str(quantity))
    assert match is not None
    number, unit, exponent = match.groups()
    return float(f"{number}e{exponent}") if exponent else float(number) * _UNITS.get(unit, 1.0)


def _probe(probe: Native, kind: str, path: KeyPath) -> Iterator[Problem]:
    handlers = [name for name in ("tcpSocket", "httpGet", "exec", "grpc") if name in probe]
    if len(handlers) != 1:
        yield Problem(path, "must have one of tcpSocket, httpGet, exec and grpc")
    if kind == "readinessProbe" and "terminationGracePeriodSeconds" in probe:
        yield Problem((*path, "terminationGracePeriodSeconds"), "is not allowed in a readiness probe")
    if kind != "readinessProbe" and probe.get("successThreshold", 1) != 1:
        yield Problem((*path, "successThreshold"), "must be 1")


def _security(own: Native, around: Native, path: KeyPath) -> Iterator[Problem]:
    merged = {**around, **own}
    if merged.get("runAsNonRoot") and merged.get("runAsUser") == 0:
        yield Problem((*path, "runAsNonRoot"), "is true, and the user is root: the pod would never start")
    for kind in ("seccompProfile", "appArmorProfile"):
        profile = own.get(kind, {})
        local = profile.get("localhostProfile", "")
        if local.startswith("/") or ".." in local.split("/"):
            yield Problem((*path, kind, "localhostProfile"), "leads out of the folder of profiles")
        if (profile.get("type") == "Localhost") != bool(local):
            yield Problem((*path, kind, "localhostProfile"), "goes with the type Localhost, and with no other")
    if own.get("privileged") and own.get("allowPrivilegeEscalation") is False:
        yield Problem((*path, "privileged"), "is true, and allowPrivilegeEscalation is false")


def _unique(names: Sequence[str], path: KeyPath, what: str) -> Iterator[Problem]:
    for place, name in enumerate(names):
        if name in names[:place]:
            yield Problem(path, f"has a second {what} {name}", "keep one")
