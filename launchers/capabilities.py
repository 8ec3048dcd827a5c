"""Optional capabilities of a launcher besides the five methods of `Launcher`: one protocol for each.

The command line tests for a capability with `isinstance`, and never for a launcher's name. A launcher has a capability
if it has its methods; it need not derive from the protocol. Docs: docs/launchers.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from ortflow.launchers.base import Request, Submission
    from ortflow.launchers.findings import Finding
    from ortflow.launchers.status import RunStatus
    from ortflow.launchers.sweeps import Sweep
    from ortflow.workflow.run.rundir import RunDir
    from ortflow.workflow.spec.run import RunSpec


@runtime_checkable
class Overview(Protocol):
    """Finds the status of many runs with one query."""

    def statuses(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        """Return the status of each run, in the same order; may leave out details that need a query for each run."""


@runtime_checkable
class Listing(Protocol):
    """Finds runs that have no directory on this machine: `ortflow list -b NAME`."""

    scope: ClassVar[str]
    """Where the launcher searched, for the message about missing runs: ` or in …`."""

    def listed(self, runs: Sequence[RunDir], *, everywhere: bool) -> list[RunStatus]:
        """Return the status of these runs, and of the cluster's others: of the user's namespace, or `everywhere`."""


@runtime_checkable
class Validating(Protocol):
    """Checks a run against its own rules: `ortflow validate`."""

    def validate(self, spec: RunSpec, source: Mapping[str, Any], *, chosen: bool) -> str | None:
        """Raise Faults or UserError if the launcher cannot run it. Starts nothing, queries no cluster.

        Returns what could not be checked on this machine, and why; None if all was.

        Parameters
        ----------
        spec
            The run, its paths as written.
        source
            The values of the run file as written.
        chosen
            Whether the user named this launcher; otherwise the run file only has its section.
        """


@runtime_checkable
class Elsewhere(Protocol):
    """Its runs read and write files that this machine does not see (`elsewhere = True`)."""

    def files_at(self, spec: RunSpec) -> str:
        """Return which machines see a run's files, and where, to complete `not checked: …, because …`."""


@runtime_checkable
class Examining(Protocol):
    """Checks whether a run can work there: `ortflow doctor -b NAME`."""

    def examine(self, submission: Submission, *, file: bool, overrides: bool) -> Iterator[Finding]:
        """Yield a finding for each check. Starts nothing.

        Without a run `file` the submission stands for an unknown run; `overrides`: whether the
        user has given values for it.
        """


@dataclass(frozen=True)
class Trial:
    """The job that `doctor` starts to check the nodes."""

    nodes: int | None
    """Number of nodes; the run's own if not given."""
    wait: float
    """Seconds to wait for its start."""
    report: Callable[[str], None]
    """Called with each progress line."""


@runtime_checkable
class Trying(Protocol):
    """Examines nodes with a job: `ortflow doctor --job`."""

    def examine_with_job(
        self, submission: Submission, trial: Trial, *, file: bool, overrides: bool
    ) -> Iterator[Finding]:
        """Yield the findings of `examine`, and those of a job on the nodes."""


@runtime_checkable
class Chaining(Protocol):
    """Has a run wait until others have finished: `ortflow submit --after`, `Submission.after`."""

    chains: ClassVar[bool]
    """True."""


@runtime_checkable
class Sweeping(Protocol):
    """Submits the runs of a sweep as one job: `ortflow submit --set`."""

    def check_sweep(self, count: int) -> None:
        """Raise UserError if a sweep with this number of runs does not fit."""

    def request_sweep(self, sweep: Sweep, submissions: Sequence[Submission], at_once: int | None) -> Request:
        """Return the request for a sweep: at most `at_once` of its runs run at the same time. Starts nothing."""

    def submit_sweep(self, request: Any) -> str:
        """Start it and return its handle. Raises UserError if it can never run."""

    def cancel_sweep(self, runs: Sequence[RunDir], *, now: bool) -> int:
        """Ask runs of a sweep to save and stop, or to stop `now`; returns how many were active."""


@runtime_checkable
class Adopting(Protocol):
    """Finds runs in its cluster that were submitted from elsewhere."""

    def adopt(self, handle: str, runs: Path) -> RunDir:
        """Return the run directory of LAUNCHER://WHERE, created in the folder `runs` if missing. Raises UserError."""

    def handles(self, name: str) -> tuple[list[str], list[str]]:
        """Return the handles of active runs of a name, in the user's namespace and in others; both empty if unknown."""


@runtime_checkable
class Supervising(Protocol):
    """Needs a process outside the cluster for some repairs: `ortflow supervise`."""

    def supervise(self, run: RunDir, report: Callable[[str], None]) -> int:
        """Supervise the run until it ends; returns its exit code. `report` is called with each message."""


@runtime_checkable
class Claiming(Protocol):
    """Renders the storage of a run separately: `ortflow render --with-claim`."""

    def with_claim(self, request: Any) -> Request:
        """Return the request with the claim of its storage."""


@runtime_checkable
class AtLogin(Protocol):
    """Can be used on a login node: `--host`."""

    def login_python(self, spec: RunSpec) -> str | None:
        """Return the Python that the run file names for what runs there; None if it names none. Pure."""
