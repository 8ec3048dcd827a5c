"""Pods of runs with all sorts of overlays on them, as far as our own rules let them through.

A test on a real API server sends them as a dry run: what it refuses of a pod, it would refuse of the operator's, and
the run would hang. So each refusal is a rule that is missing in `workflow/spec/checks/kubernetes_pod.py`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from kubernetes_runs import RunFile, one, pod_of, rendered, run_file

from ortflow.manifests.kubernetes.overlay import merge
from ortflow.manifests.kubernetes.rules import broken
from ortflow.workflow.spec.checks.kubernetes_shapes import CONTAINER, POD
from ortflow.workflow.spec.checks.shapes import ANY, Shape

TEXTS = (
    "a", "b", "x.y/z", "A", "a b", "1", "1Gi", "100m", "http", "/a", "/b/c", "zone", "10.0.0.1", "-", "a_b", "5",
    "kubernetes.io/hostname", "data", "shm", "side", "..", "metadata.name",
)  # fmt: skip
NUMBERS = (0, 1, 2, 5, 30, 80, 2222, 70000)
NAMES = ("a", "x.y/z", "cpu", "memory", "nvidia.com/gpu", "ephemeral-storage", "hugepages-2Mi", "A b", "1")
MADE_ELSEWHERE = ("serviceAccountName", "priorityClassName", "runtimeClassName")
"""Names of what a cluster has or has not."""


def pods(chance: random.Random, count: int) -> Iterator[RunFile]:
    """So many pods that our rules let through."""
    run = run_file({"volume": {"claim": "c"}}, resources={"nodes": 2, "cpus_per_rank": 1, "memory": "1Gi"})
    job = one(rendered(run), "MPIJob")
    while count:
        which = chance.choice(["Launcher", "Worker"])
        patch = {"spec": {"mpiReplicaSpecs": {which: {"template": {"spec": _patch(chance, which.lower())}}}}}
        patched = merge(job, patch)
        if not [*broken(patched, job)]:
            pod = {key: value for key, value in pod_of(patched, which).items() if key not in MADE_ELSEWHERE}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"any-{count}"}, "spec": pod}
            count -= 1


def _patch(chance: random.Random, name: str) -> RunFile:
    keys = [key for key in POD if key not in ("containers!", "restartPolicy", "*")]
    patch = {key: any_value(chance, POD[key]) for key in chance.sample(keys, chance.randint(0, 3))}
    keys = [key for key in CONTAINER if key not in ("name!", "command", "args", "*")]
    container = {key: any_value(chance, CONTAINER[key]) for key in chance.sample(keys, chance.randint(0, 2))}
    patch["containers"] = [{**container, "name": name}]
    if chance.random() < 0.2:
        patch["containers"].append({"image": "a", **any_value(chance, CONTAINER), "name": "side"})
    return patch


def any_value(chance: random.Random, shape: Shape) -> Any:
    """A value of a shape; not each one makes sense."""
    if isinstance(shape, dict):
        return _any_keys(chance, shape)
    if isinstance(shape, list):
        return [any_value(chance, shape[0]) for _ in range(chance.randint(1, 2))]
    if isinstance(shape, frozenset):
        return chance.choice(sorted(shape))
    if isinstance(shape, type):
        return chance.choice({str: TEXTS, int: NUMBERS, bool: (True, False)}[shape])
    fitting = [value for value in (*TEXTS, *NUMBERS) if shape is not ANY and not shape(value)]
    return chance.choice(fitting) if fitting else None


def _any_keys(chance: random.Random, shape: dict[str, Shape]) -> RunFile:
    found: RunFile = {}
    for key, below in shape.items():
        if below is ANY:
            continue
        if key == "*":
            found |= {chance.choice(NAMES): any_value(chance, below) for _ in range(chance.randint(0, 2))}
        elif key.endswith("!") or chance.random() < 0.3:
            found[key.rstrip("!")] = any_value(chance, below)
    return found
