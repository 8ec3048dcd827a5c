"""Every document of a run, in the order in which Helm installs their kinds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from ortflow import __version__
from ortflow.manifests.kubernetes import options
from ortflow.manifests.kubernetes.common import own
from ortflow.manifests.kubernetes.defaults import defaults, paths
from ortflow.manifests.kubernetes.evaluate import Scope, evaluate
from ortflow.manifests.kubernetes.functions import digest
from ortflow.manifests.kubernetes.functions import job_name as name_of_job
from ortflow.manifests.kubernetes.mpijob import mpijob
from ortflow.manifests.kubernetes.overlay import matches, merge
from ortflow.manifests.kubernetes.rules import broken
from ortflow.manifests.kubernetes.run import claim, config_map, service_account
from ortflow.manifests.kubernetes.tree import Node, Not
from ortflow.manifests.kubernetes.values import canonical, lookup, merged
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.checks.kubernetes import require
from ortflow.workflow.spec.problem import Problem, dotted

if TYPE_CHECKING:
    from ortflow.workflow.spec.run import RunSpec

FILES, OVERLAY = "backends.kubernetes.files", "backends.kubernetes.overlay"
UNREADABLE = re.compile("[\x7f-\x9f\ufffe\uffff]")
"""What stands unescaped in JSON, and what YAML does not take."""
CARRIED_LIMIT = 900 * 1024
"""Bytes of the run file and the files beside it; the API server takes 1 MiB of a ConfigMap."""


@dataclass(frozen=True)
class Placement:
    """What a run's documents need beside its run file."""

    suffix: str | None = None
    """What makes the job's name a new one; a digest of the values if not given."""
    new_budget: bool = False
    """Failures and preemptions so far no longer count."""
    fresh: bool = False
    """Put the run that the directory holds aside, and start anew."""
    namespace: str | None = None
    """Where the documents go, for what must name it; backends.kubernetes.namespace wins."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """The text of each of backends.kubernetes.files, by its path there."""


@dataclass(frozen=True)
class Part:
    """A document, and when there is one."""

    name: str
    tree: Node
    condition: Node = True


PARTS: tuple[Part, ...] = (
    Part("networkpolicy", options.network_policy(), own("network_policy")),
    Part("disruptionbudget", options.disruption_budget(), own("disruption_budget")),
    Part("serviceaccount", service_account(), Not(own("service_account"))),
    Part("supervisor-account", options.supervisor_account(), own("supervisor")),
    Part("configmap", config_map()),
    Part("claim", claim(), own("volume.create")),
    Part("supervisor-role", options.role(), own("supervisor")),
    Part("supervisor-rolebinding", options.role_binding(), own("supervisor")),
    Part("tensorboard-service", options.tensorboard_service(), own("tensorboard")),
    Part("tensorboard", options.tensorboard(), own("tensorboard")),
    Part("supervisor", options.supervisor(), own("supervisor")),
    Part("mpijob", mpijob()),
)
"""In the order in which Helm installs their kinds."""


@cache
def all_defaults() -> dict[str, Any]:
    """The defaults of every key that the documents look at."""
    looked_at = [path for part in PARTS for path in (*paths(part.tree), *paths(part.condition))]
    return defaults([*looked_at, FILES, OVERLAY])


def documents(source: Mapping[str, Any], spec: RunSpec, placement: Placement) -> list[dict[str, Any]]:
    """The documents of a run; raises Faults where one of them could not run.

    `source` is the run file as written, which the ConfigMap carries: paths in it mean what they mean in the pods.
    """
    require(spec)
    if spec.backends.kubernetes.supervisor and not (spec.backends.kubernetes.namespace or placement.namespace):
        fix = "name the namespace that the run goes to"
        raise UserError(
            "is missing, and the supervisor's role needs it", where="backends.kubernetes.namespace", fix=fix
        )
    values = merged(all_defaults(), source)
    params = _params(values, spec, placement)
    scope = Scope(values, params)
    found = [evaluate(part.tree, scope) for part in PARTS if evaluate(part.condition, scope)]
    return _overlaid(found, values["backends"]["kubernetes"]["overlay"])


def job_name(source: Mapping[str, Any], spec: RunSpec, placement: Placement) -> str:
    """The name of the MPIJob that `documents` makes."""
    return str(_params(merged(all_defaults(), source), spec, placement)["job"])


def without_claim(found: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
    """The documents without the claim of `volume.create`, and the claim's name; None where there is none."""
    claims = [document for document in found if document["kind"] == "PersistentVolumeClaim"]
    kept = [document for document in found if document["kind"] != "PersistentVolumeClaim"]
    return kept, str(claims[0]["metadata"]["name"]) if claims else None


def _params(values: Mapping[str, Any], spec: RunSpec, placement: Placement) -> dict[str, Any]:
    contents = {f"file-{place}": _content(path, placement) for place, path in enumerate(lookup(values, FILES) or ())}
    run = canonical(values)
    if found := UNREADABLE.search(run):
        what = f"the run file contains the character U+{ord(found.group()):04X}, which does not travel in a ConfigMap"
        raise UserError(what, fix="remove it")
    if len(run.encode()) + sum(len(text.encode()) for text in contents.values()) > CARRIED_LIMIT:
        what = f"are more than {CARRIED_LIMIT // 1024} KiB together with the run file, and travel in a ConfigMap"
        raise UserError(what, where=FILES, fix="keep small files only, and put the others on the volume")
    suffix = placement.suffix or digest(run + (canonical(contents) if contents else ""))
    return {
        "text": run,
        "contents": contents,
        "job": name_of_job(spec.name, spec.resources.nodes, suffix),
        "namespace": spec.backends.kubernetes.namespace or placement.namespace,
        "version": __version__,
        "new_budget": placement.new_budget,
        "fresh": placement.fresh,
    }


def _content(path: str, placement: Placement) -> str:
    if path not in placement.contents:
        raise ValueError(f"the text of {path} was not given")
    return placement.contents[path]


def _overlaid(found: list[dict[str, Any]], overlays: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The documents with every overlay on them; raises Faults with what one of them breaks."""
    faults: list[UserError] = []
    after = [*found]
    for place, entry in enumerate(overlays):
        where = f"{OVERLAY}[{place}]"
        meant = [index for index, document in enumerate(found) if matches(entry, document)]
        if not meant:
            faults.append(UserError("meets no document of the run", where=where, fix=_those(found)))
        for index in meant:
            merged_document = merge(after[index], entry["patch"])
            problems = [*broken(merged_document, found[index])]
            faults += [_fault(problem, found[index], where) for problem in problems]
            if not problems:
                after[index] = merged_document
    if faults:
        raise Faults(faults)
    return after


def _fault(problem: Problem, document: Mapping[str, Any], where: str) -> UserError:
    return UserError(
        f"makes {document['kind']} {dotted(problem.path)} wrong: it {problem.what}", where=where, fix=problem.fix
    )


def _those(found: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(f"{document['kind']} {document['metadata']['name']}" for document in found)
    return f"there are: {names}"
