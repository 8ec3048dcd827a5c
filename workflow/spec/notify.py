"""The section `monitor.notify`: who is told how a run goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ortflow.workflow.spec.base import Section, Text

Notice = Literal["finished", "failed", "hung", "budget_low", "loss_nan"]


class Notify(Section):
    """A command or a web address that is sent a message when something happens to the run."""

    on: list[Notice] = Field(min_length=1)
    """`finished`; `failed`: it has ended and is not restarted; `hung`: an attempt made no progress and was ended;
    `budget_low`: the next failure or preemption ends the run; `loss_nan`: a step's loss is NaN or infinite."""
    command: list[Text] | None = Field(default=None, min_length=1)
    """Program and arguments; it gets the message as JSON on standard input, and runs in the run directory."""
    webhook: Text | None = None
    """An http or https URL to which the message is posted as JSON. `${NAME}` stands for an environment variable of the
    process that supervises the run: put secrets there, not into the run file."""
