"""Checks of what `backends.kubernetes` passes on as Kubernetes writes it. Pure; called by `kubernetes`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ortflow.workflow.spec.checks.kubernetes_pod import check_affinity, check_source, check_spread, check_toleration
from ortflow.workflow.spec.checks.kubernetes_shapes import AFFINITY, FOLDER, LABEL, SOURCES, SPREAD, TOLERATION
from ortflow.workflow.spec.checks.kubernetes_syntax import is_absolute, is_relative
from ortflow.workflow.spec.checks.shapes import ANY, check_shape, words
from ortflow.workflow.spec.problem import KeyPath, Problem, shown
from ortflow.workflow.spec.run import RunSpec

HERE: KeyPath = ("backends", "kubernetes")
OWN_VOLUMES = frozenset({"run", "data", "shm", "ssh-auth", "mpi-job-config"})
"""Volumes that ortflow or the operator makes."""
KINDS = words(
    "ConfigMap Deployment Job MPIJob NetworkPolicy PersistentVolumeClaim PodDisruptionBudget Role RoleBinding Service "
    "ServiceAccount"
)
DIRECTIVE = "$patch"
MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "port"),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
}
"""Lists whose items an overlay knows by a key; all others it replaces as a whole."""


def check_native(spec: RunSpec) -> Iterator[Problem]:
    """Every fault of tolerations, affinity, spread, volumes and overlays."""
    k8s = spec.backends.kubernetes
    yield from _shaped(k8s.affinity, AFFINITY, "affinity", check_affinity)
    yield from _shaped(k8s.topology_spread, [SPREAD], "topology_spread", check_spread)
    for key, tolerations in (
        ("tolerations", k8s.tolerations),
        ("worker_tolerations", k8s.worker_tolerations),
        ("launcher_tolerations", k8s.launcher_tolerations),
    ):
        for place, toleration in enumerate(tolerations):
            yield from _shaped(toleration, TOLERATION, (key, place), check_toleration)
    for place, volume in enumerate(k8s.volumes):
        yield from _shaped(volume, _VOLUME, ("volumes", place), _volume)
    names = [volume.get("name") for volume in k8s.volumes]
    for place, name in enumerate(names):
        if name in names[:place]:
            yield Problem(
                (*HERE, "volumes", place, "name"), f"is {name}, and so is another's", "use a different one for each"
            )
    for place, entry in enumerate(k8s.overlay):
        yield from _shaped(entry, _OVERLAY, ("overlay", place), _overlay)


_VOLUME = {
    "name!": LABEL,
    "mount!": FOLDER,
    "read_only": bool,
    "sub_path": str,
    "source!": {**SOURCES},
}
_OVERLAY = {"kind!": KINDS, "name": str, "patch!": {"*": ANY}}


def _shaped(value: Any, shape: Any, key: str | KeyPath, more: Any) -> Iterator[Problem]:
    """Faults of its shape; only where there are none, what `more` finds."""
    path = (*HERE, *((key,) if isinstance(key, str) else key))
    found = [*check_shape(value, shape, path)]
    yield from found or more(value, path)


def _volume(volume: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    yield from check_source(volume["source"], (*path, "source"))
    if volume["name"] in OWN_VOLUMES:
        yield Problem((*path, "name"), f"is {volume['name']}, which the pods have already", "give another name")
    if not is_absolute(volume["mount"]):
        fix = "give an absolute path without .. and :"
        yield Problem((*path, "mount"), f"is not a folder: {shown(volume['mount'])}", fix)
    if not is_relative(volume.get("sub_path", "-")):
        yield Problem((*path, "sub_path"), "is not a folder of the volume", "give a path inside the volume, without ..")


def _overlay(entry: dict[str, Any], path: KeyPath) -> Iterator[Problem]:
    yield from _patch(entry["patch"], (*path, "patch"))


def _patch(patch: Any, path: KeyPath) -> Iterator[Problem]:
    """What is not a strategic merge patch."""
    if isinstance(patch, list):
        for place, item in enumerate(patch):
            yield from _patch(item, (*path, place))
    if not isinstance(patch, dict):
        return
    for key, value in patch.items():
        here = (*path, key)
        if key == DIRECTIVE:
            if value not in ("delete", "replace"):
                yield Problem(here, f"must be delete or replace, not {shown(value)}")
        elif key.startswith("$"):
            yield Problem(here, "is not a directive of an overlay", "use $patch: delete or $patch: replace")
        elif isinstance(value, list) and key in MERGE_KEYS:
            yield from _merged_list(value, MERGE_KEYS[key], here)
        else:
            yield from _patch(value, here)


def _merged_list(items: list[Any], names: tuple[str, ...], path: KeyPath) -> Iterator[Problem]:
    found = {name for item in items if isinstance(item, dict) for name in names if name in item}
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            yield Problem((*path, place), f"must be a section of keys, not {shown(item)}")
        elif item == {DIRECTIVE: "replace"}:
            continue
        elif len(found) > 1 or not any(name in item for name in names):
            yield Problem((*path, place), f"has no {' or '.join(names)}, which identifies it")
        elif item.get(DIRECTIVE) == "replace":
            fix = f"write - {DIRECTIVE}: replace as an item of its own to replace the list"
            yield Problem((*path, place, DIRECTIVE), "replaces one item", fix)
        else:
            yield from _patch(item, (*path, place))
