"""Checks against the Kubernetes API's published schema, without a cluster. Pure; called by `documents`.

The schema is that of the models in the official client: each lists its fields, their types and, from release 37 on,
which are required. Without the client nothing is checked. What a schema does not contain (allowed values, ranges,
fields that exclude each other) is left to the API server: `submit` sends every document and every pod to it as a dry
run before it creates anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ortflow.workflow.spec.problem import KeyPath, Problem, nearest, shown

if TYPE_CHECKING:
    from ortflow.workflow.spec.kubernetes import KubernetesBackend

QUANTITIES = frozenset({"limits", "requests", "overhead", "sizeLimit", "divisor"})
"""Fields with amounts of resources: text in the schema, but the API server also accepts numbers."""
_LIST, _MAPPING = re.compile(r"list\[(.*)\]", re.IGNORECASE), re.compile(r"dict[\[(]str, (.*)[\])]", re.IGNORECASE)
_TYPES = {"str": (str, "text"), "int": (int, "a whole number"), "bool": (bool, "true or false")}


def available() -> bool:
    """Whether the client is installed. Importing it takes a second."""
    try:
        import kubernetes.client  # noqa: F401
    except ImportError:
        return False
    return True


def used(backend: KubernetesBackend) -> bool:
    """Whether a run file has Kubernetes values that only the schema can check."""
    return any(value for _, value, _ in _native(backend)) or bool(backend.overlay)


def check_document(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Where a document differs from the schema of its kind; of an MPIJob, its metadata and its pod templates."""
    if document["kind"] != "MPIJob":
        yield from check(document, f"V1{document['kind']}")
        return
    yield from check(document["metadata"], "V1ObjectMeta", ("metadata",))
    for kind, replicas in document["spec"]["mpiReplicaSpecs"].items():
        path = ("spec", "mpiReplicaSpecs", kind, "template")
        yield from check(replicas.get("template"), "V1PodTemplateSpec", path)


def check_native(backend: KubernetesBackend) -> Iterator[Problem]:
    """Faults of the values that `backends.kubernetes` passes on unchanged, each at its key path in the run file."""
    for path, value, kind in _native(backend):
        if value:
            yield from check(value, kind, ("backends", "kubernetes", *path))


def _native(backend: KubernetesBackend) -> Iterator[tuple[KeyPath, Any, str]]:
    yield ("affinity",), backend.affinity, "V1Affinity"
    yield ("topology_spread",), backend.topology_spread, "list[V1TopologySpreadConstraint]"
    for key in ("tolerations", "worker_tolerations", "launcher_tolerations"):
        yield (key,), getattr(backend, key), "list[V1Toleration]"
    for place, volume in enumerate(backend.volumes):
        # In Kubernetes, the name is a field of the same object.
        yield ("volumes", place, "source"), {"name": volume.name, **volume.source}, "V1Volume"


def check(value: Any, kind: str, path: KeyPath = ()) -> Iterator[Problem]:
    """Where a value differs from a type of the schema, such as `V1Affinity` or `list[V1Toleration]`."""
    if not available():
        return
    from kubernetes.client import models

    yield from _check(value, kind, path, models)


def _check(value: Any, kind: str, path: KeyPath, models: Any) -> Iterator[Problem]:
    if match := _LIST.fullmatch(kind):
        if not isinstance(value, list):
            yield Problem(path, f"must be a list, not {shown(value)}")
            return
        for place, item in enumerate(value):
            yield from _check(item, match[1], (*path, place), models)
    elif match := _MAPPING.fullmatch(kind):
        if not isinstance(value, dict):
            yield Problem(path, f"must be a mapping, not {shown(value)}")
            return
        for key, item in value.items():
            yield from _check(item, match[1], (*path, key), models)
    elif (model := getattr(models, kind, None)) is not None:
        yield from _check_fields(value, model, path, models)
    elif kind in _TYPES:
        python_type, described = _TYPES[kind]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if python_type is str and number and QUANTITIES & {*path[-2:]}:
            return
        if not isinstance(value, python_type) or (python_type is int and isinstance(value, bool)):
            yield Problem(path, f"must be {described}, not {shown(value)}", "put it in quotes" if number else None)


def _check_fields(value: Any, model: Any, path: KeyPath, models: Any) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield Problem(path, f"must be a mapping, not {shown(value)}")
        return
    kinds = {key: model.openapi_types[name] for name, key in model.attribute_map.items()}
    for name, field in getattr(model, "model_fields", {}).items():
        key = field.serialization_alias or name
        if field.is_required() and value.get(key) is None:
            yield Problem((*path, key), "is missing")
    for key, item in value.items():
        if key not in kinds:
            meant = nearest(key, kinds)
            fix = f"did you mean {meant}?" if meant else "if Kubernetes has it, upgrade the package kubernetes"
            yield Problem((*path, key), "unknown key", fix)
        elif item is not None:
            yield from _check(item, kinds[key], (*path, key), models)
