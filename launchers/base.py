"""The interface of a launcher.

A launcher starts a run on a backend and follows it, in two steps: `request` checks and starts nothing, and its result
can be printed (`ortflow render`); `submit` starts exactly that. A run is identified by its directory, so status,
logs and cancel take nothing else. Other packages add launchers through the entry-point group `ortflow.launchers`:
docs/launchers.md. This module must not depend on a scheduler.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ortflow.launchers.capabilities import Overview
from ortflow.launchers.names import BUILT_IN, HERE
from ortflow.launchers.status import RunStatus, unreadable
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from ortflow.workflow.spec.run import RunSpec

GROUP = "ortflow.launchers"


@dataclass(frozen=True)
class Submission:
    """A run to start: what the command line passes to a launcher."""

    spec: RunSpec
    """The run, with absolute paths."""
    run: RunDir
    folder: Path | None = None
    """The folder of the run file, where `prepare` runs; None for a run that is resumed from its directory."""
    fresh: bool = False
    """Move the run in the directory aside and start from the beginning."""
    new_budget: bool = False
    """Failures and preemptions so far no longer count."""
    after: tuple[RunDir, ...] = ()
    """Runs that must finish first; a launcher without this capability refuses them."""
    retry: float = 0.0
    """Seconds for which a scheduler that does not answer is retried."""
    overrides: tuple[str, ...] = ()
    """KEY=VALUE of the command line, for a run that is examined, or resumed by a launcher that keeps the run file
    elsewhere; `spec` includes them."""
    printed: tuple[str, ...] | None = None
    """KEY=VALUE of the command line, if the request is only printed. No program that only the file names is started."""
    source: Mapping[str, Any] | None = None
    """The run file's values as written, for a launcher whose files are elsewhere; None without a run file."""


class Request(Protocol):
    """What a launcher would start. `str(request)` is what `ortflow render` prints, and nothing else."""

    def __str__(self) -> str: ...


class Launcher(Protocol):
    """Where runs are placed."""

    def request(self, submission: Submission) -> Request:
        """Return the request for a run. Starts nothing, writes nothing, needs no package that only ranks need."""

    def submit(self, request: Any) -> str:
        """Start it and return its handle, LAUNCHER://WHERE. Raises UserError if it can never run."""

    def status(self, run: RunDir) -> RunStatus:
        """Return the state of the run in ortflow's terms."""

    def logs(self, run: RunDir, *, attempt: int | None, rank: int, follow: bool) -> Iterator[str]:
        """Lines of a rank's log, of the newest attempt by default; followed while the run is active if requested."""

    def cancel(self, run: RunDir, *, now: bool) -> bool:
        """Ask the run to save and stop, or to stop `now`; False if it is not active."""


@cache
def find_launcher(name: str) -> Launcher:
    """Return the launcher with this name. Raises UserError if there is none, or if it cannot be loaded."""
    if name in BUILT_IN:
        module, _, kind = BUILT_IN[name].partition(":")
        built_in: Launcher = getattr(import_module(f"{GROUP}.{module}"), kind)()
        return built_in
    entry_points = _others()
    if name not in entry_points:
        names = sorted({*BUILT_IN, *entry_points})
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
        raise UserError(f"unknown launcher {name!r}", fix=hint)
    try:
        launcher: Launcher = entry_points[name].load()()
    except Exception as error:  # the module may raise anything
        message = (
            f"the launcher {name!r} cannot be loaded from {entry_points[name].value} ({type(error).__name__}: {error})"
        )
        raise UserError(message, fix="reinstall the package that provides it") from error
    return launcher


def offering(capability: type[Any]) -> dict[str, Any]:
    """Every launcher with a capability (`ortflow.launchers.capabilities`), by name; one that cannot be loaded has none.

    Loads all launchers: for messages, and for commands without a named launcher.
    """
    launchers: dict[str, Any] = {}
    for name in (*BUILT_IN, *sorted(_others().keys() - BUILT_IN)):
        with suppress(UserError):
            launcher = find_launcher(name)
            if isinstance(launcher, capability):
                launchers[name] = launcher
    return launchers


def ways_to(capability: type[Any]) -> str:
    """What to add to a command line that needs a capability: `add -b NAME`, for each launcher that has it."""
    return "add " + " or ".join(f"-b {name}" for name in offering(capability))


def is_elsewhere(launcher: Launcher) -> bool:
    """Whether runs of the launcher read and write files that this machine does not see."""
    return bool(getattr(launcher, "elsewhere", False))


def _others() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def launcher_of(run: RunDir) -> Launcher:
    """The launcher that a run was submitted to last."""
    return find_launcher(launcher_name(run.read_attempts()))


def launcher_name(records: Sequence[dict[str, Any]]) -> str:
    """The name of the launcher that has the run, or to which it is being submitted (`submitting`). Pure."""
    refused = {record.get("submission") for record in records if record.get("event") == "refused"}
    names = [
        str(record["launcher"])
        for record in records
        if record.get("event") in ("submit", "submitting")
        and "launcher" in record
        and record.get("submission", "") not in refused
    ]
    return names[-1] if names else HERE


def statuses(runs: Sequence[RunDir]) -> list[RunStatus]:
    """Return the status of each run, in the same order; one query for each launcher that supports it."""
    by_name: dict[str, list[int]] = {}
    run_statuses: dict[int, RunStatus] = {}
    for place, run in enumerate(runs):
        try:
            by_name.setdefault(launcher_name(run.read_attempts()), []).append(place)
        except OSError as error:
            run_statuses[place] = unreadable(run, error)
    for name, places in by_name.items():
        launcher, launcher_runs = find_launcher(name), [runs[place] for place in places]
        answers = (
            launcher.statuses(launcher_runs)
            if isinstance(launcher, Overview)
            else [launcher.status(run) for run in launcher_runs]
        )
        run_statuses.update(zip(places, answers, strict=True))
    return [run_statuses[place] for place in range(len(runs))]
