"""The run file's section `backends.spool`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from ortflow.workflow.spec.base import Section, Text, no_items
from ortflow.workflow.spec.launcher_options import Forms, LauncherOptions
from ortflow.workflow.spec.problem import KeyPath, Problem
from ortflow.workflow.spec.run import RunSpec


class Mail(Section):
    """Who is notified about the job."""

    to: Text
    """Address."""


class SpoolOptions(LauncherOptions):
    """Options of the spool."""

    FORMS = Forms(
        sections={("mail",): "to"},
        commands=(("wrapper",),),
        minutes=(("limit",),),
        stand_ins={("queue",): "-", ("mail", "to"): "-"},
    )

    queue: Text
    """Queue that takes the job."""
    priority: Annotated[int, Field(ge=0, le=9)] = 5
    """Jobs of a higher one go first."""
    limit: Text | None = None
    """Wall-clock limit of the job."""
    wrapper: list[Text] = Field(default_factory=no_items)
    """Command in front of the rank's."""
    mail: Mail | None = None
    """Who is notified about the job."""

    def problems(self, spec: RunSpec, here: KeyPath) -> Iterator[Problem]:
        """A job of the spool is one process."""
        if spec.world_size > 1:
            what = f"starts one rank, and resources has {spec.world_size}"
            ranks = (("resources", "nodes"), ("resources", "ranks_per_node"))
            yield Problem(here, what, "set resources.ranks_per_node to 1", others=ranks)
