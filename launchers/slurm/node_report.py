"""A node's report in a trial job: run there by the ranks' interpreter, from a copy in the shared folder.

    python node_report.py node FOLDER      one a node: folder, disk, packages, inputs
    python node_report.py rank FOLDER      one a rank: the MPI world, GPUs

Needs only the standard library, because it reports missing packages; `ortflow.launchers.slurm.trial`
collects the files. FOLDER/request.json lists what to check.
"""

from __future__ import annotations

import errno
import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

BLOCK, BLOCKS = 1 << 22, 16
"""Bytes, and how many times they are written to measure the disk: 64 MiB."""
PATIENCE = 4.0
"""Seconds after which no further block is written."""
OTHERS = 10.0
"""Seconds for the files of other nodes to become visible."""
IMPORTS = "import onnx, pyarrow, safetensors, ortflow.workflow.onnx_runtime, ortflow.workflow.executor"
"""Imports that show whether compiled packages fit the node's system."""


def main(kind: str, folder: str) -> None:
    """Write one report."""
    with open(os.path.join(folder, "request.json")) as file:
        request = json.load(file)
    if kind == "node":
        name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        write(folder, f"{name}.node", collect(folder, name, request))
    else:
        write(folder, f"{socket.gethostname()}-{os.getpid()}.rank", connect(request))


def collect(folder: str, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """The report of one node."""
    return {
        "node": name,
        "host": socket.gethostname(),
        "path": sys.executable,
        "version": sys.version_info[:2],
        "platform": sys.platform,
        "packages": packages(request["packages"]),
        "imports": imports(),
        "others": others(folder, int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))),
        "lock": lock(os.path.join(folder, "lock")),
        "bytes_per_second": speed(os.path.join(folder, f"{name}.data")),
        "free": free(folder),
        "missing": [path for path in request["paths"] if not os.access(path, os.R_OK)],
    }


def preflight(mpi: Any, world: Any) -> dict[str, Any]:
    """The figures of all nodes, as before a run's first step, on rank 0."""
    try:
        gate = importlib.import_module("ortflow.workflow.preflight.gate")
        ranks = importlib.import_module("ortflow.workflow.comm.mpi").MpiRanks(mpi, world)
        cores = importlib.import_module("ortflow.workflow.system.cores")
    except ImportError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    grant = cores.grant_of_this_process(socket.gethostname())
    nodes, together = gate.best_measure(ranks, grant.host, cores.cores_of(grant, world.allgather(grant)))
    return {} if nodes is None else {"nodes": nodes, "all_reduce": together}


def connect(request: Mapping[str, Any]) -> dict[str, Any]:
    """The report of one rank."""
    report: dict[str, Any] = {
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
    }
    begun = time.monotonic()
    try:
        # By name: ortflow's launchers must not depend on MPI.
        mpi = importlib.import_module("mpi4py.MPI")
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
        return {**report, "error": f"{type(error).__name__}: {error}"}
    world = mpi.COMM_WORLD
    report["size"], report["rank"] = world.Get_size(), world.Get_rank()
    report["counted"] = world.allreduce(1)
    report["seconds"] = time.monotonic() - begun
    report["preflight"] = preflight(mpi, world)
    report["library"] = " ".join(mpi.Get_library_version().splitlines()[0].strip("\x00").split())
    if request.get("gpus"):
        nccl = importlib.import_module("nccl_report")
        report["gpus"] = nccl.collect(report["rank"], report["size"], world.allgather)
    return report


def packages(names: Sequence[str]) -> dict[str, str]:
    """Versions of installed packages; ortflow's by importing it, because it may run from a checkout."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    try:
        versions["ortflow"] = importlib.import_module("ortflow").__version__
    except ImportError:
        versions.pop("ortflow", None)
    return versions


def imports() -> str:
    """Why the ranks' imports fail; empty if they succeed. In a separate process: they may crash."""
    try:
        # In /, because `-c` searches the current folder before Python's library; -P exists from CPython 3.11 only.
        result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=40, cwd="/")
    except subprocess.TimeoutExpired:
        return "importing onnxruntime takes more than 40 s"
    if result.returncode < 0:
        return f"importing onnxruntime was ended by signal {-result.returncode}"
    lines = result.stderr.strip().splitlines()
    return (lines[-1] if lines else f"exit code {result.returncode}") if result.returncode else ""


def others(folder: str, count: int) -> dict[str, Any]:
    """The nodes whose files can be read here, and how long the last one took to become visible."""
    begun = time.monotonic()
    while True:
        afresh(folder)
        names = []
        for entry in sorted(os.listdir(folder)):
            if entry.endswith(".seen"):
                with open(os.path.join(folder, entry)) as file:
                    if file.read().strip():
                        names.append(entry[: -len(".seen")])
        waited = time.monotonic() - begun
        if len(names) >= count or waited > OTHERS:
            return {"seen": names, "seconds": waited}
        time.sleep(0.1)


def afresh(folder: str) -> None:
    """Make a network file system refresh the folder: a change from here invalidates its cache."""
    path = os.path.join(folder, f"{socket.gethostname()}-{os.getpid()}.look")
    with open(path, "w"):
        pass
    os.unlink(path)


def lock(path: str) -> str:
    """Whether a lock that another machine holds is seen: held, free (not seen), or why there are no locks."""
    try:
        # For writing: NFS emulates flock by locks of fcntl, of which an exclusive one needs that (flock(2)).
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # fcntl's locks, as of NFS, may report EACCES where flock reports EWOULDBLOCK (fcntl(2)).
        return "held" if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else str(error.strerror)
    return "free"


def speed(path: str) -> float:
    """Bytes per second that are written and flushed."""
    block = os.urandom(BLOCK)
    begun, count = time.monotonic(), 0
    with open(path, "wb", buffering=0) as file:
        while count < BLOCK * BLOCKS and time.monotonic() - begun < PATIENCE:
            count += file.write(block) or 0
        os.fsync(file.fileno())
    seconds = time.monotonic() - begun
    os.unlink(path)
    return count / seconds


def free(folder: str) -> int:
    """Free bytes."""
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def write(folder: str, name: str, report: Mapping[str, Any]) -> None:
    """Write a report atomically."""
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as file:
        json.dump(report, file)
    os.replace(path + ".part", path + ".json")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
