"""What the manifest tells a launcher or worker pod about its run, by environment variables. Read by keeper and worker.

The volume's folder `.ortflow/JOB` is how the pods of one submission speak to each other, for want of anything else that
all of them see: each worker tells there how it is, and the keeper that nobody needs the workers any more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortflow.workflow.errors import UserError


@dataclass(frozen=True)
class Pod:
    """The place of a pod in its run."""

    job: str
    """Name of the MPIJob."""
    submission: str
    """Unique to each MPIJob, also where one follows another of the same name; empty in a worker."""
    run_file: Path
    """As the ConfigMap carries it, in its folder."""
    mount: Path
    """Where the volume is, the same in every pod."""
    ssh_port: int
    new_budget: bool
    """Failures and preemptions before this submission do not count."""
    fresh: bool
    """Put an earlier run of the name aside."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Pod:
        """The pod we are in; raises UserError outside of one."""
        try:
            return cls(
                job=environment["ORTFLOW_JOB"],
                submission=environment.get("ORTFLOW_SUBMISSION", ""),
                run_file=Path(environment["ORTFLOW_RUN_FILE"]),
                mount=Path(environment["ORTFLOW_MOUNT"]),
                ssh_port=int(environment["ORTFLOW_SSH_PORT"]),
                new_budget=environment.get("ORTFLOW_NEW_BUDGET") == "1",
                fresh=environment.get("ORTFLOW_FRESH") == "1",
            )
        except KeyError as error:
            raise UserError(
                f"{error.args[0]} is not set: this command is for the pods of a run",
                fix="start the run with `ortflow submit --backend kubernetes`",
            ) from error

    @property
    def carried(self) -> Path:
        """Small files that came with the run file."""
        return self.run_file.parent / "files"

    @property
    def folder(self) -> Path:
        """Where the pods of this submission speak to each other."""
        return self.mount / ".ortflow" / self.job

    @property
    def released(self) -> Path:
        """Written when the run has ended for good: workers leave, so that nothing is held for it."""
        return self.folder / "released"

    def release(self) -> str | None:
        """What stands in `released`: another word than a worker found when it began is meant for it."""
        try:
            return self.released.read_text()
        except OSError:
            return None

    def witness(self, host: str) -> Path:
        """What a worker says of itself."""
        return self.folder / "workers" / f"{host}.json"
