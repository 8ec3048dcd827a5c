"""The parts of a pod that a run file or an overlay may write as Kubernetes does, as far as a mistake in them matters.

The API server knows of a pod template inside an MPIJob only the types of its fields. What it would refuse of a pod, it
refuses of the operator's, without a message: these tables, and the rules in `kubernetes_pod`, report it before.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Any

from ortflow.workflow.spec.checks.kubernetes_syntax import (
    QUANTITY,
    is_label,
    is_label_value,
    is_name,
    is_qualified,
)
from ortflow.workflow.spec.checks.shapes import ANY, Shape, words
from ortflow.workflow.spec.problem import shown

INT32 = 2**31 - 1


def quantity(value: Any) -> str | None:
    """What is wrong with an amount."""
    if isinstance(value, int) and not isinstance(value, bool):
        return None if value >= 0 else f"must be at least 0, not {value}"
    if isinstance(value, str) and QUANTITY.fullmatch(value):
        return None
    return f"is not an amount: {shown(value)}"


def port_name(value: Any) -> str | None:
    """What is wrong with a port's name."""
    if (
        isinstance(value, str)
        and is_label(value)
        and len(value) <= 15
        and re.search("[a-z]", value)
        and "--" not in value
    ):
        return None
    return f"is not a name of a port: {shown(value)}"


def port(value: Any) -> str | None:
    """What is wrong with a port that is given by its number or its name."""
    return port_name(value) if isinstance(value, str) else whole(1, 65535)(value)


def address(value: Any) -> str | None:
    """What is wrong with an IP address."""
    try:
        ip_address(value if isinstance(value, str) else "")
    except ValueError:
        return f"is not an IP address: {shown(value)}"
    return None


def whole(least: int, most: int = INT32) -> Shape:
    """A whole number between two."""

    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return f"must be a whole number, not {shown(value)}"
        return None if least <= value <= most else f"must be between {least} and {most}, not {shown(value)}"

    return check


def _text(fits: Any, what: str) -> Shape:
    def check(value: Any) -> str | None:
        return None if isinstance(value, str) and fits(value) else f"is not a valid {what}: {shown(value)}"

    return check


def _by_class(_value: Any) -> str:
    return "cannot be set in a pod: its priority class sets it"


NAME = _text(is_name, "name of an object")
LABEL = _text(is_label, "name: lower-case letters, digits and hyphens, at most 63")
QUALIFIED = _text(is_qualified, "name of a label")
LABEL_VALUE = _text(is_label_value, "value of a label")
FOLDER = _text(lambda text: text != "" and ":" not in text, "folder")

LABEL_SELECTOR: Shape = {
    "matchLabels": {"*": LABEL_VALUE},
    "matchExpressions": [
        {"key!": QUALIFIED, "operator!": words("In NotIn Exists DoesNotExist"), "values": [LABEL_VALUE]}
    ],
}
TOLERATION: Shape = {
    "key": QUALIFIED,
    "operator": words("Equal Exists"),
    "value": LABEL_VALUE,
    "effect": words("NoSchedule PreferNoSchedule NoExecute"),
    "tolerationSeconds": int,
}
SPREAD: Shape = {
    "maxSkew!": whole(1),
    "minDomains": whole(1),
    "topologyKey!": QUALIFIED,
    "whenUnsatisfiable!": words("DoNotSchedule ScheduleAnyway"),
    "labelSelector": LABEL_SELECTOR,
    "matchLabelKeys": [QUALIFIED],
    "nodeAffinityPolicy": words("Honor Ignore"),
    "nodeTaintsPolicy": words("Honor Ignore"),
}
_NODE_EXPRESSION: Shape = {
    "key!": str,
    "operator!": words("In NotIn Exists DoesNotExist Gt Lt"),
    "values": [str],
}
_NODE_TERM: Shape = {"matchExpressions": [_NODE_EXPRESSION], "matchFields": [_NODE_EXPRESSION]}
_POD_TERM: Shape = {
    "topologyKey!": QUALIFIED,
    "labelSelector": LABEL_SELECTOR,
    "namespaceSelector": LABEL_SELECTOR,
    "namespaces": [LABEL],
    "matchLabelKeys": [QUALIFIED],
    "mismatchLabelKeys": [QUALIFIED],
}
_POD_AFFINITY: Shape = {
    "requiredDuringSchedulingIgnoredDuringExecution": [_POD_TERM],
    "preferredDuringSchedulingIgnoredDuringExecution": [{"weight!": whole(1, 100), "podAffinityTerm!": _POD_TERM}],
}
AFFINITY: Shape = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms!": [_NODE_TERM]},
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight!": whole(1, 100), "preference!": _NODE_TERM}],
    },
    "podAffinity": _POD_AFFINITY,
    "podAntiAffinity": _POD_AFFINITY,
}

_MODE = whole(0, 0o777)
_ITEMS: Shape = [{"key!": str, "path!": str, "mode": _MODE}]
SOURCES: dict[str, Shape] = {
    "persistentVolumeClaim": {"claimName!": NAME, "readOnly": bool},
    "hostPath": {
        "path!": FOLDER,
        "type": frozenset(
            ["", *["DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"]]
        ),
    },
    "nfs": {"server!": str, "path!": _text(lambda text: text.startswith("/"), "absolute path"), "readOnly": bool},
    "emptyDir": {"medium": str, "sizeLimit": quantity},
    "configMap": {"name!": NAME, "items": _ITEMS, "defaultMode": _MODE, "optional": bool},
    "secret": {"secretName!": NAME, "items": _ITEMS, "defaultMode": _MODE, "optional": bool},
    "csi": {
        "driver!": NAME,
        "fsType": str,
        "readOnly": bool,
        "volumeAttributes": {"*": str},
        "nodePublishSecretRef": {"name!": NAME},
    },
    "ephemeral": ANY,
    "projected": ANY,
    "downwardAPI": ANY,
    "image": ANY,
    "cephfs": ANY,
    "fc": ANY,
    "iscsi": ANY,
    "rbd": ANY,
}
"""A volume's sources."""

_SECURITY: Shape = {
    "runAsUser": whole(0),
    "runAsGroup": whole(0),
    "runAsNonRoot": bool,
    "seccompProfile": {"type!": words("RuntimeDefault Unconfined Localhost"), "localhostProfile": str},
    "appArmorProfile": {"type!": words("RuntimeDefault Unconfined Localhost"), "localhostProfile": str},
    "*": ANY,
}
_HANDLERS: Shape = {
    "tcpSocket": {"port!": port, "host": str},
    "httpGet": {"port!": port, "path": str, "host": str, "scheme": words("HTTP HTTPS"), "httpHeaders": ANY},
    "exec": {"command!": [str]},
    "grpc": {"port!": whole(1, 65535), "service": str},
}
PROBE: Shape = {
    **_HANDLERS,
    "initialDelaySeconds": whole(0),
    "periodSeconds": whole(1),
    "timeoutSeconds": whole(1),
    "successThreshold": whole(1),
    "failureThreshold": whole(1),
    "terminationGracePeriodSeconds": whole(1),
}
_REFERENCE: Shape = {"name!": NAME, "optional": bool}
ENV: Shape = {"name!": str, "value": str, "valueFrom": ANY}
CONTAINER: Shape = {
    "name!": LABEL,
    "image": str,
    "imagePullPolicy": words("Always IfNotPresent Never"),
    "command": [str],
    "args": [str],
    "workingDir": str,
    "env": [ENV],
    "envFrom": [{"prefix": str, "configMapRef": _REFERENCE, "secretRef": _REFERENCE}],
    "ports": [
        {
            "containerPort!": whole(1, 65535),
            "hostPort": whole(0, 65535),
            "name": port_name,
            "protocol": words("TCP UDP SCTP"),
            "hostIP": str,
        }
    ],
    "resources": {"requests": {"*": quantity}, "limits": {"*": quantity}, "claims": ANY},
    "securityContext": {
        **_SECURITY,
        "privileged": bool,
        "allowPrivilegeEscalation": bool,
        "readOnlyRootFilesystem": bool,
        "capabilities": {"add": [str], "drop": [str]},
        "procMount": words("Default Unmasked"),
    },
    "volumeMounts": [
        {
            "name!": str,
            "mountPath!": FOLDER,
            "subPath": str,
            "subPathExpr": str,
            "readOnly": bool,
            "recursiveReadOnly": words("Disabled IfPossible Enabled"),
            "mountPropagation": words("None HostToContainer Bidirectional"),
        }
    ],
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "startupProbe": PROBE,
    "terminationMessagePolicy": words("File FallbackToLogsOnError"),
    "restartPolicy": words("Always Never OnFailure"),
    "*": ANY,
}
POD: Shape = {
    "containers!": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": [{"name!": LABEL, **SOURCES, "*": ANY}],
    "restartPolicy": words("Never OnFailure"),
    "terminationGracePeriodSeconds": whole(0),
    "activeDeadlineSeconds": whole(1),
    "dnsPolicy": words("ClusterFirst ClusterFirstWithHostNet Default None"),
    "dnsConfig": {"nameservers": [address], "searches": [NAME], "options": ANY},
    "nodeSelector": {"*": LABEL_VALUE},
    "nodeName": NAME,
    "hostname": LABEL,
    "subdomain": LABEL,
    "serviceAccountName": NAME,
    "automountServiceAccountToken": bool,
    "hostNetwork": bool,
    "hostPID": bool,
    "hostIPC": bool,
    "hostUsers": bool,
    "shareProcessNamespace": bool,
    "enableServiceLinks": bool,
    "setHostnameAsFQDN": bool,
    "securityContext": {
        **_SECURITY,
        "fsGroup": whole(0),
        "fsGroupChangePolicy": words("OnRootMismatch Always"),
        "supplementalGroups": [whole(0)],
    },
    "imagePullSecrets": [{"name!": NAME}],
    "affinity": AFFINITY,
    "schedulerName": NAME,
    "tolerations": [TOLERATION],
    "hostAliases": [{"ip!": address, "hostnames": [NAME]}],
    "priorityClassName": NAME,
    "preemptionPolicy": _by_class,
    "priority": _by_class,
    "runtimeClassName": NAME,
    "topologySpreadConstraints": [SPREAD],
    "*": ANY,
}
"""A pod's specification; fields that are not named here are the API server's to judge."""
