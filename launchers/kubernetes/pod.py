"""What the manifest passes to a launcher or worker pod in environment variables. Read by the supervisor process
and the worker.

The pods of one submission communicate through the volume's folder `.ortflow/JOB`, as nothing else is visible to
all of them: each worker writes its report there, and the supervisor process releases the workers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ortflow.workflow.errors import UserError

FINISHED = "finished"
"""Start of the content of `released` if workers leave only when the operator has not deleted them for a while."""


@dataclass(frozen=True)
class Pod:
    """The place of a pod in its run."""

    job: str
    """Name of the MPIJob."""
    submission: str
    """Unique to each MPIJob, even if an earlier one had the same name; empty in a worker."""
    run_file: Path
    """The run file as carried by the ConfigMap, in its folder."""
    mount: Path
    """Where the volume is, the same in every pod."""
    ssh_port: int
    new_budget: bool
    """Failures and preemptions before this submission do not count."""
    fresh: bool
    """Move an earlier run of the name aside."""
    name: str = ""
    """Its name, which the operator's hosts have; with `hostNetwork` the host name is the node's."""
    address: str = ""
    """Its address."""
    node: str = ""
    """The node that it is on; empty if a manifest of an earlier version does not say so."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Pod:
        """The pod of this process. Raises UserError outside a pod."""
        try:
            return cls(
                job=environment["ORTFLOW_JOB"],
                submission=environment.get("ORTFLOW_SUBMISSION", ""),
                run_file=Path(environment["ORTFLOW_RUN_FILE"]),
                mount=Path(environment["ORTFLOW_MOUNT"]),
                ssh_port=int(environment["ORTFLOW_SSH_PORT"]),
                new_budget=environment.get("ORTFLOW_NEW_BUDGET") == "1",
                fresh=environment.get("ORTFLOW_FRESH") == "1",
                # A manifest of an earlier version lacks these.
                name=environment.get("ORTFLOW_POD") or socket.gethostname(),
                address=environment.get("ORTFLOW_ADDRESS") or socket.gethostbyname(socket.gethostname()),
                node=environment.get("ORTFLOW_POD_NODE", ""),
            )
        except KeyError as error:
            raise UserError(
                f"{error.args[0]} is not set: this command is for the pods of a run",
                fix="start the run with `ortflow submit --backend kubernetes`",
            ) from error

    @property
    def carried(self) -> Path:
        """The small files that came with the run file."""
        return self.run_file.parent / "files"

    @property
    def folder(self) -> Path:
        """The folder through which the pods of this submission communicate."""
        return self.mount / ".ortflow" / self.job

    @property
    def released(self) -> Path:
        """Written when the run has ended for good: workers exit, so that they hold no resources."""
        return self.folder / "released"

    def release(self) -> str | None:
        """Content of `released`: a worker acts on it if it differs from the content at its start."""
        try:
            return self.released.read_text()
        except OSError:
            return None

    def worker_report(self, host: str) -> Path:
        """A worker's report about itself."""
        return self.folder / "workers" / f"{host}.json"
