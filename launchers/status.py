"""How a run is, read from its directory: the same for every launcher. Read only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ortflow.launchers.locks import holder_of
from ortflow.launchers.plain import total_steps
from ortflow.launchers.progress import Progress
from ortflow.launchers.records import State, last_end, next_attempt, state, used
from ortflow.launchers.tail import last_records
from ortflow.workflow.rundir import RunDir


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

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "state": self.state.value}


def read_status(run: RunDir) -> RunStatus:
    """The status as the directory tells it; whether a launcher lives is seen where its lock is."""
    records = run.read_attempts()
    holder = holder_of(run.lock)
    progress = Progress(total_steps=total_steps(run))
    for record in last_records(run.events(0), 1 << 20):
        progress.apply(record)
    budget, end = used(records), last_end(records)
    found = state(records, holder is not None)
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
        values = yaml.load(run_file.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, yaml.YAMLError):
        return None
    name = values.get("name") if isinstance(values, dict) else None
    return name if isinstance(name, str) else None
