"""The run file's section `backends.gridengine`."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.workflow.spec.base import Text
from ortflow.workflow.spec.launcher_options import LauncherOptions
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import RunSpec


class GridEngineOptions(LauncherOptions):
    """Options of Grid Engine."""

    queue: Text | None = None
    """Queue of the job."""
    parallel_environment: Text = "smp"
    """Parallel environment that gives several slots on one host (`allocation_rule $pe_slots`)."""

    def problems(self, spec: RunSpec, here: KeyPath) -> Iterator[Problem]:
        """A job has one host."""
        if spec.resources.nodes > 1:
            what = f"starts ranks on one host, and resources has {spec.resources.nodes} nodes"
            yield Problem(here, what, "set resources.nodes to 1", others=(("resources", "nodes"),))
