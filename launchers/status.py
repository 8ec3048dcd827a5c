"""How a run is, read from its directory: the same for every launcher. Read only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ortflow.launchers.locks import holder_of
from ortflow.launchers.plain import total_steps
from ortflow.launchers.progress import Progress
from ortflow.launchers.records import State, last_end, next_attempt, state, used
from ortflow.launchers.tail import telling_records
from ortflow.workflow.rundir import RunDir

_NAME_LINE = re.compile(rb"^name: ([a-z0-9-]*[a-z][a-z0-9-]*)$", re.MULTILINE)


@dataclass(frozen=True)
class RunStatus:
    """A run at one moment; None where nothing is known."""

    name: str
    directory: str
    state: State
    attempts: int
    failures: int
    """Since the budget was last renewed."""
    preemptions: int
    step: int
    total_steps: int | None
    loss: float | None
    evaluation: dict[str, float]
    checkpoint: int | None
    """Step of the newest checkpoint that the record tells of."""
    phase: str | None
    seconds_left: float | None
    time: float | None
    """Unix time of the newest event."""
    cause: str | None
    """Why the last attempt ended."""
    why: str | None
    """Why it was, or was not, started again."""
    launcher: str | None
    host: str | None
    pid: int | None
    """Of whatever supervises the run now."""
    exported: str | None
    job: str | None = None
    """A scheduler's id of the job that the run has, or had last."""
    job_restarts: int | None = None
    """How often the scheduler has started that job again."""
    nodes: str | None = None
    """Where it runs, in the scheduler's words."""
    waits: str | None = None
    """Why nothing runs at the moment, and what a person can do."""
    starts_at: float | None = None
    """Unix time at which the scheduler expects it to start."""
    job_ends_at: float | None = None
    """Unix time at which the scheduler ends it: its time limit."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "state": self.state.value}


def read_status(
    run: RunDir, *, records: Sequence[dict[str, Any]] | None = None, alive: bool | None = None
) -> RunStatus:
    """The status as the directory tells it.

    `records`: those of attempts.jsonl, if they are known. `alive`: whether a launcher is at work on the run; where
    nobody says, that is seen by its lock.
    """
    records = run.read_attempts() if records is None else records
    holder = holder_of(run.lock) if alive is None else None
    progress = Progress(total_steps=total_steps(run))
    for record in telling_records(run.events(0)):
        progress.apply(record)
    budget, end = used(records), last_end(records)
    found = state(records, holder is not None if alive is None else alive)
    submits = [record for record in records if record.get("event") == "submit"]
    return RunStatus(
        name=_name(run.run_file) or run.root.name,
        directory=str(run.root),
        state=found,
        attempts=next_attempt(records),
        failures=budget.failures,
        preemptions=budget.preemptions,
        step=progress.step,
        total_steps=progress.total_steps,
        loss=progress.loss,
        evaluation=progress.evaluation,
        checkpoint=progress.checkpoint,
        phase=progress.phase if found is State.RUNNING else None,
        seconds_left=progress.seconds_left if found is State.RUNNING else None,
        time=progress.time,
        cause=None if end is None else end.get("cause"),
        why=None if end is None else end.get("why"),
        launcher=submits[-1].get("launcher") if submits else None,
        host=str(holder["host"]) if holder and "host" in holder else None,
        pid=int(holder["pid"]) if holder and "pid" in holder else None,
        exported=progress.exported,
    )


def _name(run_file: Path) -> str | None:
    try:
        text = run_file.read_bytes()
        # As a launcher writes it; hundreds of whole files take a second to parse.
        if match := _NAME_LINE.search(text):
            return match[1].decode()
        values = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError):
        return None
    name = values.get("name") if isinstance(values, dict) else None
    return name if isinstance(name, str) else None
