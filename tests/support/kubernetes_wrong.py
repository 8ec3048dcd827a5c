"""Some hundred invalid run files and overlays for Kubernetes: each is refused by ortflow or by the API server.

`OURS` are those that ortflow's checks must find. `SERVERS` are left to the API server: they pass the checks, and a test
sends their documents and pods to a real one as a dry run. Each has a name that describes the fault.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kubernetes_runs import RunFile, run_file
from kubernetes_wrong_keys import KEYS, KEYS_TO_SERVER, SECTIONS
from kubernetes_wrong_overlays import (
    CONTAINER_PATCHES,
    CONTAINER_TO_SERVER,
    JOB_PATCHES,
    JOB_TO_SERVER,
    POD,
    POD_PATCHES,
    POD_TO_SERVER,
    SCHEMA_PATCHES,
    SERVERS_PATCHES,
)

HERE = "backends.kubernetes.overlay[0]"


@dataclass(frozen=True)
class Wrong:
    """A run file with a fault."""

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


def every() -> Iterator[tuple[Wrong, bool]]:
    """Each invalid one, and whether only the API server refuses it."""
    for key, values in KEYS.items():
        for place, value in enumerate(values):
            if value is not None:
                yield _marked(
                    Wrong(f"{key}-{place}", run_file({key: value}), f"backends.kubernetes.{key}"),
                    KEYS_TO_SERVER.get(key, set()),
                    place,
                )
    for key in ("image", "volume"):
        written = run_file()
        del written["backends"]["kubernetes"][key]
        yield Wrong(f"{key}-missing", written, f"backends.kubernetes.{key}"), False
    for place, (key, sections) in enumerate(SECTIONS):
        yield Wrong(f"{key}-{place}", run_file(**sections), key), False
    twice = run_file({"env": {"A": "1"}, "secret_env": {"A": "s/k"}})
    yield Wrong("env-twice", twice, "backends.kubernetes.secret_env.A"), False
    twice = run_file({"queue": "q", "labels": {"kueue.x-k8s.io/queue-name": "r"}})
    yield Wrong("queue-twice", twice, "backends.kubernetes.labels.kueue.x-k8s.io/queue-name"), False
    for path, values in JOB_PATCHES.items():
        for place, value in enumerate(values):
            yield _marked(_overlay(path, place, value), JOB_TO_SERVER.get(path, set()), place)
    for which, name in (("Launcher", "launcher"), ("Worker", "worker")):
        pod = POD.format(which)
        for key, values in POD_PATCHES.items():
            for place, value in enumerate(values):
                wrong = _overlay(f"{pod}.{key}", place, _named(value, name))
                yield _marked(wrong, POD_TO_SERVER.get(key, set()), place)
        for key, values in CONTAINER_PATCHES.items():
            if key == "readinessProbe" and which == "Launcher":
                values = values[1:3]
            for place, value in enumerate(values):
                item = [{"name": name, key: value}]
                wrong = _overlay(f"{pod}.containers", place, item, f"overlay-{which}-container-{key}")
                yield _marked(wrong, CONTAINER_TO_SERVER.get(key, set()), place)
    for left, patches in ((False, SCHEMA_PATCHES), (True, SERVERS_PATCHES)):
        for place, (kind, path, value) in enumerate(patches):
            for which, name in (("Launcher", "launcher"), ("Worker", "worker")):
                if which == "Launcher" or "{}" in path:
                    entry = {"kind": kind, "patch": _nested(path.format(which), _named(value, name))}
                    if kind == "ServiceAccount":
                        entry["name"] = "supervisor"
                    written = run_file({**_ALL_OPTIONS, "overlay": [entry]}, name=f"wrong-{place}-{name}")
                    label = f"{kind}-{path.format(which)}-{place}"
                    yield Wrong(f"{'server' if left else 'schema'}-{label}", written, HERE), left


def _marked(wrong: Wrong, to_server: set[int], place: int) -> tuple[Wrong, bool]:
    return wrong, place in to_server


def _overlay(path: str, place: int, value: Any, name: str | None = None) -> Wrong:
    entry = {"kind": "MPIJob", "patch": _nested(path, value)}
    return Wrong(f"{name or f'overlay-{path}'}-{place}", run_file({"overlay": [entry]}), HERE)


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


OURS: list[Wrong] = [wrong for wrong, left in every() if not left]
SERVERS: list[Wrong] = [wrong for wrong, left in every() if left]
