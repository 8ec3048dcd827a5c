"""The processes of a run on a testbed, as this machine sees them."""

from __future__ import annotations

from contextlib import suppress

import psutil
from kubernetes_cluster import Run


def rank_processes(run: Run) -> dict[int, psutil.Process]:
    """The running ranks of a run, by rank."""
    found = _of(run, "ortflow.workflow.rank")
    return {int(environment["PMI_RANK"]): process for process, environment in found if "PMI_RANK" in environment}


def mpi_processes(run: Run) -> list[psutil.Process]:
    """The daemons of MPI in the workers, and the ranks that they started."""
    ranks = [process for process, _ in _of(run, "ortflow.workflow.rank")]
    daemons = {parent.pid: parent for rank in ranks if (parent := rank.parent()) is not None}
    return [*daemons.values(), *ranks]


def supervisor_processes(run: Run) -> list[psutil.Process]:
    """The run's supervisor processes."""
    return [process for process, _ in _of(run, "ortflow.launchers.kubernetes.run_supervisor")]


def all_processes(run: Run) -> list[psutil.Process]:
    """Everything of a run that runs in its pods: ranks, what starts them, and the first processes of the containers."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.status() != "zombie" and _belongs(process.environ().get("ORTFLOW_JOB", ""), run):
                found.append(process)
    return found


def _of(run: Run, module: str) -> list[tuple[psutil.Process, dict[str, str]]]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            if words[1:3] == ["-m", module] and process.status() != "zombie":
                environment = process.environ()
                if _belongs(environment.get("ORTFLOW_JOB", ""), run):
                    found.append((process, environment))
        except psutil.Error:
            continue
    return found


def _belongs(job: str, run: Run) -> bool:
    """A run's MPIJobs have its name and six letters; in no test is one run's name a prefix of another's."""
    return job.rpartition("-")[0] == run.name
