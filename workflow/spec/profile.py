"""The section `monitor.profile`: the steps whose parts are recorded."""

from __future__ import annotations

from pydantic import Field, create_model

from ortflow.workflow.spec.base import Positive, Section

# `from` is a keyword of Python, so that no class body can name it.
_From = create_model(
    "_From",
    __base__=Section,
    **{"from": (Positive, Field(description="First step, from 1; later after a restart between the two."))},  # type: ignore[call-overload]
)


class ProfileWindow(_From):  # type: ignore[misc, valid-type]
    """Steps whose operators, collectives and waits are recorded on every rank, as a trace and a table."""

    to: Positive
    """Last step; at most 1000 behind the first."""

    @property
    def first(self) -> int:
        """The first step."""
        step: int = getattr(self, "from")
        return step
