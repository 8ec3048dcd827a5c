"""Whether the range of nodes of an elastic run makes sense. Pure; called by `check`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.checks.nodes import permitted, skipped_messages
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import RunSpec

PATH: KeyPath = ("resources", "min_nodes")


def check_elastic(spec: RunSpec) -> Iterator[Problem]:
    """Every contradiction of `resources.min_nodes` and `resources.spares` with other keys."""
    least, most = spec.resources.min_nodes, spec.resources.nodes
    nodes: KeyPath = ("resources", "nodes")
    if spec.resources.spares and least is not None:
        message = "cannot be combined with resources.min_nodes: an elastic run trains on all nodes that are there"
        yield Problem(("resources", "spares"), message, "remove one of them", others=(PATH,))
    if least is None:
        return
    if least > most:
        yield Problem(PATH, f"is {least}, more than resources.nodes, {most}", f"give at most {most}", others=(nodes,))
        return
    data = spec.parallel.data
    if least < most and data is not None:
        message = f"is {data}, and resources.min_nodes lets the number of replicas change"
        yield Problem(("parallel", "data"), message, "remove one of them", others=(PATH,))
    elif spec.elastic and most in (fitting := permitted(spec)) and len(fitting) == 1:
        message = f"is {least}, and no number of nodes below {most} fits: {'; '.join(skipped_messages(spec)[:3])}"
        related_keys: tuple[KeyPath, ...] = (
            nodes, ("resources", "ranks_per_node"), ("data", "micro_batch"), ("train", "global_batch"),
        )  # fmt: skip
        yield Problem(PATH, message, "change train.global_batch or data.micro_batch, or remove it", others=related_keys)
