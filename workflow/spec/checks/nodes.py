"""An elastic run on a certain number of its nodes. Pure.

Used by launchers, which choose the number, by every rank, which gets it in a variable, and by the check of a run file.
A step takes the same samples on any number of nodes: fewer replicas accumulate more micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ortflow.workflow.spec.checks.batch import replicas, undivided
from ortflow.workflow.spec.run import RunSpec, TrainerRunSpec

Spec = TypeVar("Spec", bound=RunSpec)

VARIABLE = "ORTFLOW_NODES"
"""Number of nodes of an attempt, set by the launcher of an elastic run."""
CHOSEN = "ORTFLOW_CHOSEN_NODES"
"""Names of these nodes, where a job has more of them."""
REASON = "ORTFLOW_NODES_REASON"
"""That number in words, and why it is not larger; for the events."""


def on_nodes(spec: Spec, nodes: int) -> Spec:
    """The run on so many nodes; a trainer's with the samples per step that it has on all of them."""
    update: dict[str, Any] = {"resources": spec.resources.model_copy(update={"nodes": nodes})}
    if isinstance(spec, TrainerRunSpec):
        update["train"] = spec.train.model_copy(update={"global_batch": spec.global_batch})
    return spec.model_copy(update=update)


def variables(spec: RunSpec, words: str) -> dict[str, str]:
    """The variables of an attempt's ranks, from the run on the attempt's nodes."""
    return {VARIABLE: str(spec.resources.nodes), REASON: words}


def of_this_attempt(spec: Spec, environment: Mapping[str, str]) -> Spec:
    """The run as the ranks of an attempt train it; unchanged if its number of nodes is fixed."""
    return on_nodes(spec, int(environment[VARIABLE])) if spec.elastic and VARIABLE in environment else spec


def permitted(spec: RunSpec) -> tuple[int, ...]:
    """Numbers of nodes that an elastic run may have, ascending; only `resources.nodes` for any other run."""
    if not spec.elastic:
        return (spec.resources.nodes,)
    return tuple(nodes for nodes in _range(spec) if _trouble(spec, nodes) is None)


def skipped(spec: RunSpec) -> dict[int, str]:
    """Numbers of nodes in the range that do not fit, and why."""
    return (
        {nodes: reason for nodes in _range(spec) if (reason := _trouble(spec, nodes)) is not None}
        if spec.elastic
        else {}
    )


def skipped_messages(spec: RunSpec) -> list[str]:
    """One message for each number of nodes that is skipped."""
    return [
        f"{nodes} node{'' if nodes == 1 else 's'} will not be used: {reason}" for nodes, reason in skipped(spec).items()
    ]


def _range(spec: RunSpec) -> range:
    return range(spec.resources.min_nodes or spec.resources.nodes, spec.resources.nodes + 1)


def _trouble(spec: RunSpec, nodes: int) -> str | None:
    if not isinstance(spec, TrainerRunSpec):
        return None
    small, ranks_per_replica = on_nodes(spec, nodes), spec.parallel.pipeline * spec.parallel.horizontal
    if small.world_size % ranks_per_replica:
        return f"{ranks_per_replica} ranks of a replica do not divide {small.world_size} ranks"
    if undivided(small.global_batch, spec.data.micro_batch, small.grid) is not None:
        return (
            f"{replicas(small.grid)} x {spec.data.micro_batch} samples (data.micro_batch) do not divide the "
            f"{small.global_batch} samples of a step"
        )
    return None
