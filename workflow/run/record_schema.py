"""The fields and types of events and of attempts.jsonl, by which `record` validates lines.

A separate module because importing pydantic takes time, and `--help` imports `record`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import Required, TypedDict

Whole = Annotated[int, Field(ge=0, lt=2**63)]
Code = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Time = Annotated[float, Field(ge=0, lt=1e11)]
"""Unix time, before the year 5138."""
STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Event(TypedDict, total=False):
    """A line of a rank's events; docs/events.md describes the fields."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    event: Required[str]
    time: Time
    attempt: Whole
    rank: Whole
    step: Whole
    from_step: Whole
    to_step: Whole
    epoch: Whole
    samples: Whole | None
    tokens: Whole | None
    loss: float | None
    lr: float | None
    grad_norm: float | None
    seconds: float | None
    stall_seconds: float | None
    bytes: Whole
    phase: str
    path: str
    reason: str
    message: str
    metric: str
    key: str
    exit_code: Code
    pid: Whole
    host: str
    world_size: Whole


class Change(TypedDict):
    """A changed key of the run file."""

    key: str
    before: Any
    now: Any


class Attempt(TypedDict, total=False):
    """A line of attempts.jsonl."""

    __pydantic_config__ = STRICT  # type: ignore[misc]

    event: Required[str]
    time: Time
    attempt: Whole
    outcome: Literal["finished", "user_error", "preempted", "failure", "lost"]
    next: Literal["restart", "stop"]
    step: Whole
    exit_code: Code | None
    rank: Whole | None
    pause: float
    cause: str | None
    why: str | None
    asked: str | None
    counts: bool
    new_budget: bool
    launcher: str
    job: str | None
    submission: str | None
    follows: str | None
    given_up: bool
    of: str
    boot: str
    uptime: float
    world_size: Whole
    pid: Whole
    host: str
    blamed: list[str]
    excludes: dict[str, str]
    changes: list[Change]
    notes: list[str]
