"""The status of a run, read from its directory: the same for every launcher. Read only."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ortflow.launchers.attempts.exclusion import exclusion_reasons
from ortflow.launchers.attempts.locks import holder_of
from ortflow.launchers.attempts.tail import status_records
from ortflow.launchers.records import State, elastic_ranks, last_end, next_attempt, state, used
from ortflow.launchers.view.best import Best, best_of, main_metric
from ortflow.launchers.view.lines import counted
from ortflow.launchers.view.plain import total_steps
from ortflow.launchers.view.progress import Progress
from ortflow.workflow.preflight.judge import summary
from ortflow.workflow.run.record import ATTEMPTS, damage_message, read_records
from ortflow.workflow.run.rundir import RunDir, relocated
from ortflow.workflow.system.disk_space import Notice
from ortflow.workflow.system.files import CHUNK, open_regular, read_whole

DEEPEST = 64
"""Levels of a run file that are read: parsing takes time with the square of the depth, and no run file has ten."""
_PLACE_LINE = re.compile(rb"^run_dir: ([^'\"].*)$", re.MULTILINE)
_NAME_LINE = re.compile(rb"^name: ([a-z0-9-]*[a-z][a-z0-9-]*)$", re.MULTILINE)


@dataclass(frozen=True)
class RunStatus:
    """The status of a run; None if unknown."""

    name: str
    directory: str
    state: State
    attempts: int = 0
    failures: int = 0
    """Since the budget was last reset."""
    preemptions: int = 0
    step: int = 0
    total_steps: int | None = None
    loss: float | None = None
    evaluation: dict[str, float | None] = field(default_factory=dict)
    metric: str | None = None
    """The metric of the evaluations by which the run is judged: that of `checkpoint.best`, else the first."""
    best_value: float | None = None
    """Its best value so far."""
    best_step: int | None = None
    """The step after which that was measured."""
    checkpoint: int | None = None
    """Step of the newest recorded checkpoint."""
    best_checkpoint: dict[str, Any] | None = None
    """Metric, value and step of the best checkpoint, and `path` of its export, with `checkpoint.best`."""
    memory: dict[str, int] | None = None
    """Bytes of rank 0's process, or of its program with all that it has started: `resident`, `peak`, on GPUs more."""
    phase: str | None = None
    seconds_left: float | None = None
    time: float | None = None
    """Unix time of the newest event."""
    cause: str | None = None
    """Why the last attempt ended."""
    why: str | None = None
    """Why it was, or was not, restarted."""
    launcher: str | None = None
    host: str | None = None
    pid: int | None = None
    """Process id of the supervisor."""
    exported: str | None = None
    job: str | None = None
    """The scheduler's id of the run's current or last job."""
    job_restarts: int | None = None
    """How often the scheduler has restarted that job."""
    ranks: str | None = None
    """Ranks and nodes of the newest attempt of an elastic run, and why they are not more."""
    nodes: str | None = None
    """Where it runs, in the scheduler's notation."""
    waits: str | None = None
    """Why nothing runs at the moment, and the fix."""
    starts_at: float | None = None
    """Unix time at which the scheduler expects it to start."""
    job_ends_at: float | None = None
    """Unix time at which the scheduler ends it: its time limit."""
    preflight: str | None = None
    """The figures of the nodes in the newest preflight."""
    excluded_nodes: dict[str, str] = field(default_factory=dict)
    """Nodes that take part in no further attempt, and why."""
    damaged: str | None = None
    """Records that cannot be read and are skipped."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "state": self.state.value}


def read_status(
    run: RunDir, *, records: Sequence[dict[str, Any]] | None = None, alive: bool | None = None
) -> RunStatus:
    """The status from the directory.

    `records`: those of attempts.jsonl, if already read. `alive`: whether a launcher supervises the run; if
    not given, its lock shows it.
    """
    read, damaged = read_records(run.attempts, ATTEMPTS)
    records = read if records is None else records
    holder = holder_of(run.lock) if alive is None else None
    progress = Progress(total_steps=total_steps(run))
    own_events, unread = status_records(run.events(0))
    for record in own_events:
        progress.apply(record)
    metric, best = _judged(run, progress)
    budget, end = used(records), last_end(records)
    run_state = state(records, holder is not None if alive is None else alive)
    submits = [record for record in records if record.get("event") == "submit"]
    return RunStatus(
        name=_name(run.run_file) or run.root.name,
        directory=str(run.root),
        state=run_state,
        attempts=next_attempt(records),
        failures=budget.failures,
        preemptions=budget.preemptions,
        step=progress.step,
        total_steps=progress.total_steps,
        loss=progress.loss,
        evaluation=progress.evaluation,
        metric=metric,
        best_value=None if best is None else best.value,
        best_step=None if best is None else best.step,
        checkpoint=progress.checkpoint,
        best_checkpoint=_best(run, progress.best),
        memory=_memory(own_events),
        phase=progress.phase if run_state is State.RUNNING else None,
        seconds_left=progress.seconds_left if run_state is State.RUNNING else None,
        time=progress.time,
        cause=None if end is None else end.get("cause"),
        why=None if end is None else end.get("why"),
        launcher=submits[-1].get("launcher") if submits else None,
        host=str(holder["host"]) if holder and "host" in holder else None,
        pid=int(holder["pid"]) if holder and "pid" in holder else None,
        exported=_here(run, progress.exported),
        damaged=_damage(run, damaged, unread),
        waits=_lack(run) if run_state.active else None,
        ranks=elastic_ranks(records) if run_state.active else None,
        preflight=_preflight(own_events),
        excluded_nodes=exclusion_reasons(records),
    )


def _judged(run: RunDir, progress: Progress) -> tuple[str | None, Best | None]:
    """The metric by which a run is judged, and its best value: those of `checkpoint.best`, if it has one."""
    best_record = progress.best or {}
    metric, value = best_record.get("metric"), best_record.get("value")
    if isinstance(metric, str) and isinstance(value, int | float):
        return metric, Best(metric, float(value), best_record["step"])
    metric = main_metric(progress.evaluation)
    return metric, best_of(run.events(0), metric) if metric is not None else None


def unreadable(run: RunDir, error: OSError) -> RunStatus:
    """The status of a run whose records cannot be read at all."""
    messages = f"{error.filename or run.attempts}: {error.strerror}"
    return RunStatus(run.root.name, str(run.root), State.LOST, damaged=messages)


def _here(run: RunDir, path: str | None) -> str | None:
    """Where something of the run lies, whose record may be older than the directory's place."""
    return None if path is None else relocated(path, written_place(run), run.root)


def _preflight(own_events: Sequence[dict[str, Any]]) -> str | None:
    newest = next((record for record in reversed(own_events) if record.get("event") == "preflight"), None)
    nodes = newest.get("nodes") if newest is not None else None
    if not isinstance(nodes, dict) or not nodes:
        return None
    all_reduce = newest.get("all_reduce") if newest is not None else None
    shown = summary(nodes, all_reduce if isinstance(all_reduce, (int, float)) else None)
    return f"{counted(len(nodes), 'node')}: {shown}"


def _memory(own_events: Sequence[dict[str, Any]]) -> dict[str, int] | None:
    usage = next((record for record in reversed(own_events) if record.get("event") == "usage"), None)
    if usage is None:
        return None
    names = ("resident", "peak", "gpu_buffers", "gpu_used", "gpu_peak")
    return {name: usage[name] for name in names if type(usage.get(name)) is int} or None


def _best(run: RunDir, best: dict[str, Any] | None) -> dict[str, Any] | None:
    if best is None or not isinstance(best.get("path"), str):
        return best
    return {**best, "path": _here(run, best["path"])}


def written_place(run: RunDir) -> str | None:
    """Where the run file says that the run lies; None if it says nothing, or cannot be read."""
    try:
        text = read_whole(run.run_file)
        if place_line := _PLACE_LINE.search(text):
            return place_line[1].decode(errors="replace")
        return _top_level(text, "run_dir")
    except (OSError, yaml.YAMLError):
        return None


def _lack(run: RunDir) -> str | None:
    lack = Notice(run.heartbeat).read()
    return None if lack is None else str(lack)


def _damage(run: RunDir, attempts: list[int], events: int) -> str | None:
    messages = [damage_message(run.attempts, attempts)]
    if events:
        messages.append(
            f"{run.events(0)}: {events} line{' is not a record' if events == 1 else 's are not records'}, skipped"
        )
    try:
        descriptor = open_regular(run.events(0))
        with os.fdopen(descriptor, "rb") as file:
            if file.read(CHUNK).startswith(b"\0"):
                messages.append(f"{run.events(0)}: begins with zeros, not with a record")
    except FileNotFoundError:
        pass
    except OSError as error:
        messages.append(f"{run.events(0)}: {error.strerror}")
    return "; ".join(filter(None, messages)) or None


def _name(run_file: Path) -> str | None:
    try:
        text = read_whole(run_file)
        # Only the form that a launcher writes: parsing hundreds of whole files takes a second.
        if match := _NAME_LINE.search(text):
            return match[1].decode()
        return _top_level(text, "name")
    except (OSError, yaml.YAMLError):
        return None


def _top_level(text: bytes, key: str) -> str | None:
    """The text of a key of the outermost mapping, read event by event: damaged files may nest endlessly."""
    depth = 0
    scalars: list[str | None] = []
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            if depth == 0 and not isinstance(event, yaml.MappingStartEvent):
                return None
            if depth == 1:
                scalars.append(None)
            depth += 1
            if depth > DEEPEST:
                return None
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif depth == 1:
            scalars.append(event.value if isinstance(event, yaml.ScalarEvent) else None)
        if len(scalars) == 2:
            if scalars[0] == key:
                return scalars[1]
            scalars.clear()
    return None
