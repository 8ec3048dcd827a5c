"""Every document of a run, in the order in which Helm installs their kinds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ortflow.manifests.kubernetes import options
from ortflow.manifests.kubernetes.common import Context, Document
from ortflow.manifests.kubernetes.dump import dump
from ortflow.manifests.kubernetes.mpijob import mpijob
from ortflow.manifests.kubernetes.names import digest, inside
from ortflow.manifests.kubernetes.names import job_name as name_of_job
from ortflow.manifests.kubernetes.overlay import matches, merge
from ortflow.manifests.kubernetes.rules import broken
from ortflow.manifests.kubernetes.run import claim, config_map, service_account
from ortflow.manifests.kubernetes.schema import check_native
from ortflow.manifests.kubernetes.values import canonical, with_defaults
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.checks.kubernetes import require
from ortflow.workflow.spec.problem import Problem, dotted

if TYPE_CHECKING:
    from ortflow.workflow.spec.kubernetes import KubernetesBackend, Overlay
    from ortflow.workflow.spec.run import RunSpec

FILES, OVERLAY = "backends.kubernetes.files", "backends.kubernetes.overlay"
CARRIED_LIMIT = 900 * 1024
"""Bytes of the run file and the files beside it; the API server accepts a ConfigMap of 1 MiB."""


@dataclass(frozen=True)
class Placement:
    """The input of a run's documents besides its run file."""

    suffix: str | None = None
    """Makes the job's name unique; a digest of the values if not given."""
    new_budget: bool = False
    """Do not count earlier failures and preemptions."""
    fresh: bool = False
    """Move the existing run directory aside, and start from the beginning."""
    namespace: str | None = None
    """Namespace for documents that must name it; backends.kubernetes.namespace takes precedence."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """The text of each of backends.kubernetes.files, by its path there."""


def documents(source: Mapping[str, Any], spec: RunSpec, placement: Placement) -> list[Document]:
    """The documents of a run. Raises Faults if the run could not start from them.

    `source` is the run file as written, for the ConfigMap: its paths are valid in the pods.
    """
    require(spec)
    if spec.backends.kubernetes.supervisor and not (spec.backends.kubernetes.namespace or placement.namespace):
        fix = "name the namespace that the run goes to"
        raise UserError(
            "is missing, and the supervisor's role needs it", where="backends.kubernetes.namespace", fix=fix
        )
    if problems := [*check_native(spec.backends.kubernetes)]:
        raise Faults([UserError(problem.what, where=dotted(problem.path), fix=problem.fix) for problem in problems])
    context = _context(source, spec, placement)
    rendered = [make(context) for make in _makers(spec.backends.kubernetes)]
    return _overlaid(rendered, spec.backends.kubernetes.overlay)


def job_name(source: Mapping[str, Any], spec: RunSpec, placement: Placement) -> str:
    """The name of the MPIJob that `documents` makes."""
    return _context(source, spec, placement).job


def _makers(backend: KubernetesBackend) -> Iterator[Callable[[Context], Document]]:
    if backend.network_policy:
        yield options.network_policy
    if backend.disruption_budget:
        yield options.disruption_budget
    if not backend.service_account:
        yield service_account
    if backend.supervisor:
        yield options.supervisor_account
    yield config_map
    if backend.volume.create:
        yield claim
    if backend.supervisor:
        yield options.role
        yield options.role_binding
    if backend.tensorboard:
        yield options.tensorboard_service
        yield options.tensorboard
    if backend.supervisor:
        yield options.supervisor
    yield mpijob


def without_claim(documents: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """The documents without the claim of `volume.create`, and the claim's name; None if there is none."""
    claims = [document for document in documents if document["kind"] == "PersistentVolumeClaim"]
    remaining_documents = [document for document in documents if document["kind"] != "PersistentVolumeClaim"]
    return remaining_documents, str(claims[0]["metadata"]["name"]) if claims else None


def _context(source: Mapping[str, Any], spec: RunSpec, placement: Placement) -> Context:
    values, backend = with_defaults(source), spec.backends.kubernetes
    contents = {f"file-{place}": _content(path, placement) for place, path in enumerate(backend.files)}
    run_file = dump([values], sort_keys=True).removeprefix("---\n")
    if len(run_file.encode()) + sum(len(text.encode()) for text in contents.values()) > CARRIED_LIMIT:
        message = (
            f"are more than {CARRIED_LIMIT // 1024} KiB together with the run file, the limit of the "
            f"ConfigMap that carries them"
        )
        raise UserError(message, where=FILES, fix="list only small files, and put the others on the volume")
    suffix = placement.suffix or digest(canonical(values) + (canonical(contents) if contents else ""))
    return Context(
        spec=spec,
        job=name_of_job(spec.name, spec.asked_nodes, suffix),
        namespace=backend.namespace or placement.namespace,
        run_file=run_file,
        run_dir=inside(backend.volume.mount, values.get("run_dir") or f"runs/{spec.name}"),
        contents=contents,
        new_budget=placement.new_budget,
        fresh=placement.fresh,
    )


def _content(path: str, placement: Placement) -> str:
    if path not in placement.contents:
        raise ValueError(f"the text of {path} was not given")
    return placement.contents[path]


def _overlaid(documents: list[Document], overlays: Sequence[Overlay]) -> list[Document]:
    """The documents with all overlays applied. Raises Faults if an overlay breaks a rule."""
    faults: list[UserError] = []
    after = [*documents]
    for place, entry in enumerate(overlays):
        key = f"{OVERLAY}[{place}]"
        meant = [index for index, document in enumerate(documents) if matches(entry, document)]
        if not meant:
            faults.append(UserError("matches no document of the run", where=key, fix=_those(documents)))
        for index in meant:
            merged_document = merge(after[index], entry.patch)
            problems = [*broken(merged_document, documents[index])]
            faults += [_fault(problem, documents[index], key) for problem in problems]
            if not problems:
                after[index] = merged_document
    if faults:
        raise Faults(faults)
    return after


def _fault(problem: Problem, document: Mapping[str, Any], key: str) -> UserError:
    return UserError(
        f"makes {document['kind']} {dotted(problem.path)} wrong: {problem.what}", where=key, fix=problem.fix
    )


def _those(documents: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(f"{document['kind']} {document['metadata']['name']}" for document in documents)
    return f"there are: {names}"
