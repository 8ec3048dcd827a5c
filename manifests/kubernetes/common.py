"""Shared by all documents: metadata, labels, names, and paths in a pod. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ortflow import __version__
from ortflow.manifests.kubernetes.names import sibling
from ortflow.workflow.spec.kubernetes import KubernetesBackend
from ortflow.workflow.spec.run import RunSpec

Document = dict[str, Any]

RUN_FOLDER = "/etc/ortflow/run"
"""Mount point of the ConfigMap."""
RUN_LABEL, JOB_LABEL, COMPONENT_LABEL = "ortflow.dev/run", "ortflow.dev/job", "ortflow.dev/component"
VERSION_ANNOTATION = "ortflow.dev/version"


@dataclass(frozen=True)
class Context:
    """The input of all documents."""

    spec: RunSpec
    job: str
    """Name of the MPIJob."""
    namespace: str | None
    """Namespace, for documents that must name it."""
    run_file: str
    """Text of the run file in the ConfigMap."""
    run_dir: str
    """The run directory as seen in pods."""
    contents: Mapping[str, str]
    """Texts of the files beside the run file, by their key in the ConfigMap."""
    new_budget: bool = False
    fresh: bool = False

    @property
    def backend(self) -> KubernetesBackend:
        """The section `backends.kubernetes`."""
        return self.spec.backends.kubernetes

    @property
    def claim(self) -> str:
        """Name of the claim of `volume.create`."""
        return sibling(self.spec.name, "data")

    @property
    def service_account(self) -> str:
        """Account of the ranks' pods."""
        return self.backend.service_account or self.job

    @property
    def supervisor(self) -> str:
        """Name of the supervisor's job and account."""
        return f"{self.job}-supervisor"


def present(section: Mapping[str, Any]) -> Document:
    """The keys of a section that have a value."""
    return {key: value for key, value in section.items() if value is not None}


def pod_metadata(context: Context, component: str, *, lasting: bool = False) -> Document:
    """The metadata of a component's pods."""
    pod_labels = {**labels(context, component, lasting=lasting), **context.backend.labels}
    return present({"labels": pod_labels, "annotations": context.backend.annotations or None})


def labels(context: Context, component: str | None = None, *, lasting: bool = False) -> dict[str, str]:
    """The labels of every document, or of a pod of a component.

    A `lasting` document outlives a submission: it lacks the job's label, by which documents are deleted.
    """
    run_labels = {
        "app.kubernetes.io/name": "ortflow",
        "app.kubernetes.io/managed-by": "ortflow",
        RUN_LABEL: context.spec.name,
    }
    if not lasting:
        run_labels[JOB_LABEL] = context.job
    if component is not None:
        run_labels[COMPONENT_LABEL] = component
    return run_labels


def metadata(
    context: Context,
    name: str,
    *,
    lasting: bool = False,
    extra_labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Document:
    """The metadata of a document."""
    return present(
        {
            "name": name,
            "namespace": context.backend.namespace,
            "labels": {**labels(context, lasting=lasting), **(extra_labels or {})},
            "annotations": {VERSION_ANNOTATION: __version__, **(annotations or {})},
        }
    )
