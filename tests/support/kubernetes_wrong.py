"""Wrong run files and overlays for Kubernetes, some hundred: each is refused before the API server sees it, or by it.

`OURS` are those that our checks must find. `SERVERS` are left to the API server: they pass our checks, and a test
on a real one sends their documents with strict validation. Each has a name, which says what is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes_runs import RunFile, run_file
from kubernetes_wrong_keys import KEYS, SECTIONS
from kubernetes_wrong_overlays import CONTAINER_PATCHES, JOB_PATCHES, POD, POD_PATCHES, SERVERS_PATCHES


@dataclass(frozen=True)
class Wrong:
    """A run file with something wrong in it."""

    name: str
    written: RunFile
    key: str
    """The key path that the sentence begins with."""


_ALL_OPTIONS: RunFile = {
    "volume": {"create": {"size": "1Gi"}},
    "namespace": "default",
    "supervisor": True,
    "tensorboard": True,
    "network_policy": True,
    "disruption_budget": True,
}


def ours() -> Iterator[Wrong]:
    """Those that our checks must find."""
    for key, values in KEYS.items():
        for place, value in enumerate(values):
            if value is not None:
                yield Wrong(f"{key}-{place}", run_file({key: value}), f"backends.kubernetes.{key}")
    for key in ("image", "volume"):
        written = run_file()
        del written["backends"]["kubernetes"][key]
        yield Wrong(f"{key}-missing", written, f"backends.kubernetes.{key}")
    for place, (key, sections) in enumerate(SECTIONS):
        yield Wrong(f"{key}-{place}", run_file(**sections), key)
    yield Wrong(
        "env-twice", run_file({"env": {"A": "1"}, "secret_env": {"A": "s/k"}}), "backends.kubernetes.secret_env.A"
    )
    yield Wrong(
        "queue-twice",
        run_file({"queue": "q", "labels": {"kueue.x-k8s.io/queue-name": "r"}}),
        "backends.kubernetes.labels.kueue.x-k8s.io/queue-name",
    )
    for path, values in JOB_PATCHES.items():
        yield from (_overlay(path, place, value) for place, value in enumerate(values))
    for which, name in (("Launcher", "launcher"), ("Worker", "worker")):
        pod = POD.format(which)
        for key, values in POD_PATCHES.items():
            yield from (_overlay(f"{pod}.{key}", place, _named(value, name)) for place, value in enumerate(values))
        for key, values in CONTAINER_PATCHES.items():
            if key == "readinessProbe" and which == "Launcher":
                values = values[1:3]
            for place, value in enumerate(values):
                item = [{"name": name, key: value}]
                yield _overlay(f"{pod}.containers", place, item, f"overlay-{which}-container-{key}")


def servers() -> Iterator[Wrong]:
    """Those that are left to the API server."""
    for place, (kind, path, value) in enumerate(SERVERS_PATCHES):
        for which, name in (("Launcher", "launcher"), ("Worker", "worker")):
            if which == "Launcher" or "{}" in path:
                entry = {"kind": kind, "patch": _nested(path.format(which), _named(value, name))}
                if kind == "ServiceAccount":
                    entry["name"] = "supervisor"
                written = run_file({**_ALL_OPTIONS, "overlay": [entry]}, name=f"wrong-{place}-{name}")
                yield Wrong(f"server-{kind}-{path.format(which)}-{place}", written, "")


def _overlay(path: str, place: int, value: Any, name: str | None = None) -> Wrong:
    entry = {"kind": "MPIJob", "patch": _nested(path, value)}
    return Wrong(
        f"{name or f'overlay-{path}'}-{place}", run_file({"overlay": [entry]}), "backends.kubernetes.overlay[0]"
    )


def _nested(path: str, value: Any) -> RunFile:
    found: Any = value
    for key in reversed(path.split(".")):
        found = {key: found}
    nested: RunFile = found
    return nested


def _named(value: Any, container: str) -> Any:
    """The value with the container's name in place of CONTAINER."""
    if isinstance(value, dict):
        return {key: _named(below, container) for key, below in value.items()}
    if isinstance(value, list):
        return [_named(item, container) for item in value]
    return container if value == "CONTAINER" else copy.copy(value)


OURS: list[Wrong] = [*ours()]
SERVERS: list[Wrong] = [*servers()]
