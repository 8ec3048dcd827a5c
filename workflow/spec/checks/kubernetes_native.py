"""Checks of volumes and overlays of `backends.kubernetes`, without a schema. Pure; called by `kubernetes`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ortflow.workflow.spec.checks.kubernetes_syntax import LABEL_RULE, is_absolute, is_label, is_relative
from ortflow.workflow.spec.kubernetes import Volume
from ortflow.workflow.spec.problem import KeyPath, Problem, shown
from ortflow.workflow.spec.run import RunSpec

HERE: KeyPath = ("backends", "kubernetes")
OWN_VOLUMES = frozenset({"run", "data", "shm", "ssh-auth", "mpi-job-config"})
"""Names of volumes that ortflow or the operator creates."""
DIRECTIVE = "$patch"
MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    # The patchMergeKey of a container's ports is containerPort, that of a Service's is port.
    "ports": ("containerPort", "port"),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey",),
}
"""Lists whose items an overlay identifies by a key; other lists are replaced as a whole."""


def check_native(spec: RunSpec) -> Iterator[Problem]:
    """Report every error of volumes and overlays."""
    k8s = spec.backends.kubernetes
    for place, volume in enumerate(k8s.volumes):
        yield from _volume(volume, (*HERE, "volumes", place))
    names = [volume.name for volume in k8s.volumes]
    for place, name in enumerate(names):
        if name in names[:place]:
            yield Problem(
                (*HERE, "volumes", place, "name"),
                f"is {name}, and so is the name of another volume",
                "use a different one for each",
            )
    for place, entry in enumerate(k8s.overlay):
        yield from _patch(entry.patch, (*HERE, "overlay", place, "patch"))


def _volume(volume: Volume, path: KeyPath) -> Iterator[Problem]:
    if len(volume.source) != 1:
        message = f"has several: {', '.join(volume.source)}" if volume.source else "is empty"
        yield Problem((*path, "source"), message, "give one source, such as nfs, hostPath or persistentVolumeClaim")
    if not is_label(volume.name):
        yield Problem((*path, "name"), f"is not a valid name of a volume: {shown(volume.name)}", LABEL_RULE)
    if volume.name in OWN_VOLUMES:
        yield Problem((*path, "name"), f"is {volume.name}, which the pods have already", "give another name")
    if not is_absolute(volume.mount):
        fix = "give an absolute path without .. and :"
        yield Problem((*path, "mount"), f"is not a folder: {shown(volume.mount)}", fix)
    if volume.sub_path is not None and not is_relative(volume.sub_path):
        yield Problem((*path, "sub_path"), "is not a folder of the volume", "give a path inside the volume, without ..")


def _patch(patch: Any, path: KeyPath) -> Iterator[Problem]:
    """Report what is not a valid strategic merge patch."""
    if isinstance(patch, list):
        for place, item in enumerate(patch):
            yield from _patch(item, (*path, place))
    if not isinstance(patch, dict):
        return
    for key, value in patch.items():
        key_path = (*path, key)
        if key == DIRECTIVE:
            if value not in ("delete", "replace"):
                yield Problem(key_path, f"must be delete or replace, not {shown(value)}")
        elif key.startswith("$"):
            yield Problem(key_path, "is not a directive of an overlay", "use $patch: delete or $patch: replace")
        elif isinstance(value, list) and key in MERGE_KEYS:
            yield from _merged_list(value, MERGE_KEYS[key], key_path)
        else:
            yield from _patch(value, key_path)


def _merged_list(items: list[Any], names: tuple[str, ...], path: KeyPath) -> Iterator[Problem]:
    identifiers = {name for item in items if isinstance(item, dict) for name in names if name in item}
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            yield Problem((*path, place), f"must be a mapping, not {shown(item)}")
        elif item == {DIRECTIVE: "replace"}:
            continue
        elif len(identifiers) > 1 or not any(name in item for name in names):
            yield Problem((*path, place), f"has no {' or '.join(names)}, which identifies it")
        elif item.get(DIRECTIVE) == "replace":
            fix = f"write - {DIRECTIVE}: replace as a separate item to replace the list"
            yield Problem((*path, place, DIRECTIVE), "replaces one item", fix)
        else:
            yield from _patch(item, (*path, place))
