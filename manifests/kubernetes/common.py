"""What documents share: metadata, labels, names, and where things lie in a pod. Trees, made when this is imported."""

from __future__ import annotations

from typing import Any

from ortflow.manifests.kubernetes.tree import Entries, First, Given, Item, Node, Param, Ref, call, text

RUN_FOLDER = "/etc/ortflow/run"
"""Where the ConfigMap is mounted."""
RUN_LABEL, JOB_LABEL, COMPONENT_LABEL = "ortflow.dev/run", "ortflow.dev/job", "ortflow.dev/component"
VERSION_ANNOTATION = "ortflow.dev/version"
JOB = Param("job")


def own(key: str) -> Ref:
    """A key of `backends.kubernetes`."""
    return Ref(f"backends.kubernetes.{key}")


MOUNT = own("volume.mount")
RUN_DIR = call("inside", MOUNT, First((Ref("run_dir"), text("runs/%s", Ref("name")))))
CLAIM = call("sibling", Ref("name"), "data")
TENSORBOARD = call("sibling", Ref("name"), "tensorboard")
SERVICE_ACCOUNT = First((own("service_account"), JOB))
SUPERVISOR = text("%s-supervisor", JOB)


def labels(component: str | None = None, *, lasting: bool = False) -> dict[Any, Node]:
    """The labels of everything, and of a pod of a component.

    What is `lasting` outlives a submission: it does not go with what has the job's label.
    """
    found: dict[Any, Node] = {
        "app.kubernetes.io/name": "ortflow",
        "app.kubernetes.io/managed-by": "ortflow",
        RUN_LABEL: Ref("name"),
    }
    if not lasting:
        found[JOB_LABEL] = JOB
    if component is not None:
        found[COMPONENT_LABEL] = component
    return found


def users(what: str) -> dict[Any, Node]:
    """The user's own labels or annotations, as entries of a mapping."""
    return {Entries(own(what)): Item()}


def metadata(
    name: Node, *, lasting: bool = False, more: dict[Any, Node] | None = None, notes: dict[Any, Node] | None = None
) -> Node:
    """The metadata of a document."""
    return {
        "name": name,
        "namespace": Given(own("namespace")),
        "labels": {**labels(lasting=lasting), **(more or {})},
        "annotations": {VERSION_ANNOTATION: Param("version"), **(notes or {})},
    }
