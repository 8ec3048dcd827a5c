"""`ortflow doctor` for this machine: whether a run can work here. Starts no run, only ranks that connect and exit."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflow.launchers.doctor.gpu import examine_gpu
from ortflow.launchers.file_system import existing, filesystem
from ortflow.launchers.findings import Finding, fault, from_error, ok, untested, warning
from ortflow.launchers.interpreter import Interpreter, check, examine, interpreter_line, locate
from ortflow.launchers.local import LocalLauncher
from ortflow.launchers.mpi import find_mpi
from ortflow.launchers.named_programs import unconfirmed
from ortflow.launchers.view.lines import duration, size
from ortflow.workflow.errors import UserError
from ortflow.workflow.program.source import check_source
from ortflow.workflow.spec.units import parse_memory
from ortflow.workflow.system.cores import cores_of, grant_of_this_process
from ortflow.workflow.system.disk_space import has_room, is_full

if TYPE_CHECKING:
    from ortflow.launchers.base import Submission
    from ortflow.workflow.spec.program import ProgramSection
    from ortflow.workflow.spec.run import RunSpec

CONNECT = 60.0
"""Seconds for ranks on one machine to connect."""
CHECK = 120.0
"""Seconds for the check of ONNX Runtime."""
LITTLE = 1_000_000_000
"""Bytes of disk or memory below which even a small run may fail."""
TRIED = LITTLE // 10
"""Bytes that are reserved for a moment to test a quota: on some file systems they are in memory."""


def examine_machine(submission: Submission, *, of_user: bool = True) -> Iterator[Finding]:
    """All findings, as each check ends; `of_user` False: the run stands for an unknown one."""
    spec = submission.spec
    if spec.resources.nodes > 1 and not spec.chooses_nodes:
        yield fault("resources.nodes", f"is {spec.resources.nodes}, and the local backend has one machine",
                    "set resources.nodes=1, or use another --backend")  # fmt: skip
    if (reason := unconfirmed(spec, submission.overrides)) is not None:
        yield untested("interpreter and MPI", reason)
    else:
        yield from _programs(submission, of_user)
    yield _cores(spec, of_user)
    yield _memory(spec)
    yield from _disk(existing(submission.run.root.parent))


def _programs(submission: Submission, of_user: bool) -> Iterator[Finding]:
    """The interpreter, MPI and the GPUs, by starting them."""
    spec, good = submission.spec, True
    try:
        python = examine(locate(spec.resources.python))
        check(python, program=spec.program is not None)
        yield ok("interpreter", interpreter_line(python))
        if spec.program is None:
            yield runtime_finding(python)
        else:
            yield _program(spec.program)
    except UserError as error:
        good = False
        yield from_error("interpreter", error)
    if not good:
        yield untested("MPI", "it needs an interpreter that can run ranks")
    elif spec.resources.nodes == 1 or spec.chooses_nodes:
        yield _mpi(submission, of_user)
    if good and spec.on_gpus:
        yield from examine_gpu(python.path, spec.resources.ranks_per_node)


def _program(program: ProgramSection) -> Finding:
    """Whether the program's file is there and compiles; it is not started."""
    try:
        check_source(program)
    except UserError as error:
        return from_error("program", error)
    return ok("program", f"{shlex.join(program.command) or program.script or program.module or program.function}")


def runtime_finding(python: Interpreter) -> Finding:
    """Whether its ONNX Runtime computes correctly what graphs need, without the cached result."""
    about = "ONNX Runtime"
    program = [python.path, "-m", "ortflow.workflow.runtime_check"]
    try:
        done = subprocess.run(
            program, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK, cwd="/", errors="replace"
        )
        report: dict[str, Any] = (
            json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"fault": _last_line(done)}
        )
    except (OSError, ValueError, IndexError, subprocess.SubprocessError, RecursionError) as error:
        report = {"fault": f"its check does not run: {error}"}
    if "fault" in report:
        return fault(about, report["fault"], report.get("fix") or "")
    name = f"{report['package']} {report['version']}"
    if report["faults"]:
        wrong = "; ".join(f"{need} ({fault_text})" for need, fault_text in report["faults"].items())
        return warning(
            about, f"{name} computes wrong results: {wrong}", f"runs open sessions without: {report['settings']}"
        )
    return ok(about, f"{name} computes what graphs need, checked in {duration(report['seconds'])}")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return f"its check ends with {done.returncode}" + (f": {lines[-1]}" if lines else "")


def _mpi(submission: Submission, of_user: bool) -> Finding:
    spec, about = submission.spec, "MPI"
    if spec.world_size == 1:
        return ok(about, "one rank runs without mpirun")
    setting = spec.backends.local.mpi
    mpi = find_mpi(locate(spec.resources.python), setting)
    if mpi is None:
        message = "there is no mpirun" + ("" if setting == "auto" else f" of {setting}")
        finding = fault if of_user else warning
        return finding(about, f"{message} beside the interpreter or on the PATH, and several ranks need one",
                    "`pip install 'ortflow[mpich]'`")  # fmt: skip
    try:
        ranks = _connect(submission)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return fault(about, f"{mpi.executable} does not start {spec.world_size} ranks: {error}")
    sizes = [rank.get("size") for rank in ranks]
    if sizes != [spec.world_size] * spec.world_size:
        errors = [str(rank["error"]) for rank in ranks if "error" in rank]
        error_text = errors[0] if errors else f"they see world sizes of {sizes}"
        return fault(about, f"{spec.world_size} ranks do not connect with {mpi.executable}: {error_text}",
                     "use the mpirun of the MPI beside the interpreter")  # fmt: skip
    seconds = duration(max(float(rank["seconds"]) for rank in ranks))
    return ok(about, f"{spec.world_size} ranks connect with {mpi.executable} in {seconds} ({ranks[0]['library']})")


def _connect(submission: Submission) -> list[dict[str, Any]]:
    """The reports of ranks that are started like the run's."""
    from ortflow.launchers.slurm import node_report

    command, environment = LocalLauncher().request(submission).start(0)
    with tempfile.TemporaryDirectory(prefix="ortflow-doctor-") as folder:
        (Path(folder) / "request.json").write_text(json.dumps({}))
        program = [command[-4], str(node_report.__file__), "rank", folder]
        done = subprocess.run(
            [*command[:-4], *program], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=CONNECT, cwd=folder, errors="replace",
        )  # fmt: skip
        ranks = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.rank.json"))]
    if not ranks:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ValueError(f"exit code {done.returncode}" + (f", {lines[0].strip()}" if lines else ""))
    return ranks


def _cores(spec: RunSpec, of_user: bool) -> Finding:
    cores = cores_of(grant := grant_of_this_process(socket.gethostname()), [grant])
    required = spec.resources.ranks_per_node * (spec.resources.cpus_per_rank or 1)
    if of_user and required > cores:
        return warning("cores", f"{cores}, and the run asks for {required}: ranks will wait for each other",
                       "lower resources.ranks_per_node or cpus_per_rank")  # fmt: skip
    return ok("cores", str(cores))


def _memory(spec: RunSpec) -> Finding:
    from ortflow.workflow.system import host_memory

    about, free_bytes = "memory", host_memory.available()
    text = f"{size(free_bytes)} of {size(host_memory.total())} free"
    required = parse_memory(spec.resources.memory) if spec.resources.memory is not None else LITTLE
    if required > free_bytes:
        return warning(
            about, f"{text}, and the run may need {size(required)}", "end other processes, or lower its needs"
        )
    return ok(about, text)


def _disk(folder: Path) -> Iterator[Finding]:
    about = "run directory"
    if not os.access(folder, os.W_OK):
        yield fault(about, f"{folder} may not be written", "give another run_dir, or --runs-dir")
        return
    free_bytes = shutil.disk_usage(folder).free
    kind = filesystem(folder)
    text = f"{folder}" + (f" ({kind})" if kind else "") + f", {size(free_bytes)} free"
    if free_bytes < LITTLE:
        yield warning(about, text, "make room")
    elif not has_room(folder, TRIED):
        yield warning(about, f"{text}, but a quota allows less than {size(TRIED)}", "make room, or ask for more")
    else:
        yield ok(about, text)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if is_full(error):
            return
        yield warning("locks", f"{folder} has none: {error.strerror}", "never start the same run twice there")
