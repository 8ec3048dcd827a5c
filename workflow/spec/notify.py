"""The section `monitor.notify`: messages about a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import PositiveFloat, Section, Text

Notice = Literal["finished", "failed", "hung", "budget_low", "loss_nan", "not_back"]
Address = Annotated[str, Field(pattern=r"^[^@\s<>,]+@[^@\s<>,]+$")]


class EMail(Section):
    """A message by e-mail, through a mail server (SMTP). Passwords are not part of a run file."""

    host: Text
    """The mail server."""
    port: Annotated[int, Field(ge=1, le=65535)] = 587
    """Its port."""
    security: Literal["starttls", "tls", "none"] = "starttls"
    """`starttls` begins in plain text and encrypts before anything else is sent; `tls` encrypts from the start, usually
    at port 465; `none`, such as for a relay of the own machine at port 25, takes no user."""
    sender: Address
    """Address that the message comes from."""
    to: list[Address] = Field(min_length=1)
    """Addresses that it goes to."""
    user: Text | None = None
    """Name to log in with; none does not log in."""
    password_variable: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    """Environment variable of the supervising process that contains the password."""
    password_file: Text | None = None
    """File that contains the password, and that the supervising process can read; an absolute path, or one with `~`."""


class Notify(Section):
    """A command, a web address or a mail that is sent when something happens to the run."""

    on: list[Notice] = Field(min_length=1)
    """`finished`; `failed`: it has ended and is not restarted; `hung`: an attempt made no progress and was ended;
    `budget_low`: the next failure or preemption ends the run; `loss_nan`: a step's loss is NaN or infinite;
    `not_back`: it was preempted, or restarts for another reason, and has made no new step for `not_back_seconds`. When
    it makes one after that, another message says so."""
    not_back_seconds: PositiveFloat = 1800.0
    """Seconds without a new step, from the end of the last attempt that made one, until the message `not_back`."""
    command: list[Text] | None = Field(default=None, min_length=1)
    """Program and arguments; it gets the message as JSON on standard input, and runs in the run directory."""
    webhook: Text | None = None
    """An http or https URL to which the message is posted as JSON. `${NAME}` stands for an environment variable of the
    process that supervises the run: put secrets there, not into the run file."""
    mail: EMail | None = None
    """An e-mail with the message."""
