"""The seven steps of a rank whose run is a training program.

configure records the code; runtime connects the rank processes, and finds the newest checkpoint; shard leaves the data
to the program (`ortflow.program.Sampler`); train runs the program; checkpoint, monitor and export close what it has
saved, logged and handed over.
"""

from __future__ import annotations

import importlib.util
import os
import selectors
import sys
from contextlib import suppress
from pathlib import Path

from ortflow.workflow.checkpoint.identity import Identity
from ortflow.workflow.checkpoint.manifest import Damaged
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.verify import verify
from ortflow.workflow.errors import (
    EXIT_DONE,
    EXIT_PREEMPTED,
    EXIT_USER,
    CommunicationError,
    OrtflowError,
    Preempted,
    UserError,
)
from ortflow.workflow.program.channel import Lost
from ortflow.workflow.program.child import Child
from ortflow.workflow.program.command import PACKAGES, command_of, node_command
from ortflow.workflow.program.context import ProgramContext
from ortflow.workflow.program.endings import may_lack_disk
from ortflow.workflow.program.loop import Loop
from ortflow.workflow.program.record import save_packages, save_record, take_record
from ortflow.workflow.program.rendezvous import SECONDS, alone, gather, join
from ortflow.workflow.program.report import Report, read_plan, write_plan
from ortflow.workflow.program.serve import Server
from ortflow.workflow.program.source import check_source
from ortflow.workflow.program.variables import environment_of, for_launcher, start_variables
from ortflow.workflow.run.engine import Step
from ortflow.workflow.run.events import warn
from ortflow.workflow.run.profile_records import attempts
from ortflow.workflow.spec.program import ProgramSection
from ortflow.workflow.steps.identity import identity_of, take_folder
from ortflow.workflow.system.disk_space import RECORDS, OutOfDisk, has_room
from ortflow.workflow.system.threads import start_or_call


def configure(context: ProgramContext) -> None:
    """Rank 0: check and record the code. An error is kept until all ranks can receive it."""
    if not context.leads:
        return
    program = context.spec.program
    folder = Path(program.cwd or context.run_dir.root)
    try:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}", where="program.cwd", fix="correct the path")
        check_source(program)
        check_start(program)
        command = command_of(program, sys.executable)
        context.record, diff = take_record(program, command, folder)
        save_record(context.run_dir, context.record, diff)
        identity = identity_of(context.run_dir, context.spec, "", None)
        plan = read_plan(context.run_dir)
        context.run = plan["run"] if isinstance(plan.get("run"), dict) else identity.to_json()
        write_plan(context.run_dir, {**plan, "program": command, "run": dict(context.run)})
    except OrtflowError as error:
        context.trouble = error


def check_start(program: ProgramSection) -> None:
    """Raise UserError if the launcher that starts the processes is not installed beside ortflow."""
    package = PACKAGES.get(program.start)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"is {program.start}, and {sys.executable} lacks {package}",
            where="program.start", fix=f"`{sys.executable} -m pip install {package}`, or use direct",
        )  # fmt: skip


def runtime(context: ProgramContext) -> None:
    """Connect the rank processes, and find the newest complete checkpoint."""
    spec, place = context.spec, context.place
    if place.world_size != spec.world_size:
        raise UserError(
            f"{spec.world_size} ranks were asked for, and {place.manager} placed {place.world_size}",
            where="resources",
            fix="start the ranks with the process manager of backends.NAME.mpi",
        )
    _connect(context)
    directory = context.run_dir.root / spec.checkpoint.directory
    context.store = DirectoryStore(directory, context.location)
    tensorboard = context.run_dir.root / spec.monitor.tensorboard_directory
    writes_scalars = context.leads and spec.monitor.tensorboard
    context.report = Report(context.events, context.run_dir, tensorboard if writes_scalars else None, context.clock)
    if context.leads and context.trouble is None:
        try:
            _find_newest(context)
        except OrtflowError as error:
            context.trouble = error
    _agree(context)
    context.report.begin(context.newest or 0)
    context.progress.step = context.newest or 0
    if context.newest is not None:
        path = str(context.newest_path)
        context.events.write("resume", step=context.newest, path=path, world_size=context.world.size)
    if context.leads:
        _introduce(context)
    context.leave_if_asked()
    if spec.preflight:
        from ortflow.workflow.program.preflight import gate  # numpy takes a while to import

        gate(context.peers, place, context.world.cores[place.rank], context.events)
        context.leave_if_asked()


def _connect(context: ProgramContext) -> None:
    cpus_per_rank, place = context.spec.resources.cpus_per_rank, context.place
    if place.world_size == 1:
        context.world = alone(place, cpus_per_rank)
    elif context.leads:
        context.world, context.peers = gather(
            context.run_dir, place, context.attempt, cpus_per_rank, context.leave_if_asked
        )  # fmt: skip
    else:
        context.world, peer = join(context.run_dir, place, context.attempt, cpus_per_rank, context.leave_if_asked)
        context.peers = {0: peer}


def _agree(context: ProgramContext) -> None:
    """All ranks have the newest checkpoint of rank 0, or raise its error."""
    if context.leads:
        trouble = None
        if context.trouble is not None:
            wrong = isinstance(context.trouble, UserError)
            trouble = {"what": str(context.trouble), "user": wrong}
        for peer in context.peers.values():
            peer.send({"newest": context.newest, "trouble": trouble})
        if context.trouble is not None:
            raise context.trouble
        return
    try:
        message = context.peers[0].receive(SECONDS)
    except Lost as error:
        raise CommunicationError(f"rank 0 has ended: {error}") from error
    if message.get("trouble"):
        kind = UserError if message["trouble"]["user"] else OrtflowError
        raise kind(message["trouble"]["what"])
    context.newest = message["newest"]


def _find_newest(context: ProgramContext) -> None:
    """Rank 0: the newest checkpoint whose files are as they were saved; others are reported."""
    store, rejected = context.store, set[int]()
    take_folder(store, context.run_dir, Identity.from_json(context.run))
    store.clean()
    for step in reversed(store.steps()):
        faults: list[Damaged] = verify(store, step)
        if not faults:
            context.newest = step
            break
        rejected.add(step)
        for fault in faults:
            context.events.write("checkpoint_rejected", path=str(fault.path), reason=fault.reason)
            print(f"warning: checkpoint rejected: {fault}", flush=True)
    context.distrusted = rejected


def _introduce(context: ProgramContext) -> None:
    """Rank 0: the first lines of its log."""
    world, record = context.world, context.record
    for change in context.run_dir.read_attempts():
        if change.get("event") == "changed" and change.get("attempt") == context.attempt:
            for difference in change.get("changes", ()):
                context.events.write("changed", **difference)
    context.events.write("environment", **record.environment)
    if world.size > 1:
        print(f"{world.size} ranks on {len(world.nodes)} node(s), {world.cores[0]} core(s) each", flush=True)
    if context.newest is not None:
        print(f"the newest checkpoint is {context.newest_path}", flush=True)


def shard(context: ProgramContext) -> None:
    """Nothing: the program reads its data, by `ortflow.program.Sampler` or by itself."""


def train(context: ProgramContext) -> None:
    """Run the program to its end. Raises Preempted or OrtflowError if that is not the end of the run."""
    context.leave_if_asked()
    spec, place = context.spec, context.place
    # The loop reports whether the program moves; a process that only waits does not count.
    context.stop.beat(None)
    selector = selectors.DefaultSelector()
    server = Server(selector)
    try:
        variables = start_variables(
            place, context.world, context.attempt, spec.restart.failures, spec.name
        )  # fmt: skip
        run_variables = {
            **server.variables,
            "ORTFLOW_RUN_DIR": str(context.run_dir.root),
            "ORTFLOW_RUN_NAME": spec.name,
            "ORTFLOW_ATTEMPT": str(context.attempt),
            "ORTFLOW_CHECKPOINTS": str(context.store.path),
            "ORTFLOW_SEED": str(spec.seed),
        }
        environment = for_launcher(
            spec.program.start,
            environment_of(os.environ, context.world.cores[place.rank], variables, run_variables, spec.program.env),
        )
        cwd = Path(spec.program.cwd or context.run_dir.root)
        command = _command(context)
        child = None if command is None else Child(command, cwd, environment)
        if context.leads:
            start_or_call("packages", lambda: _save_packages(context))
        if child is not None:
            context.events.write("program_start", pid=child.pid)
        context.ending = Loop(context, selector, server, child).run()
    finally:
        server.close()
        selector.close()
        for peer in context.peers.values():
            peer.close()
    conclude(context)


def _command(context: ProgramContext) -> list[str] | None:
    """What this rank starts; None if the launcher that the node's first rank starts begins its program too."""
    program, place = context.spec.program, context.place
    if program.start == "direct":
        return command_of(program, sys.executable)
    if place.local_rank != 0:
        return None
    return node_command(program, sys.executable, place, context.world, on_gpus=context.spec.on_gpus)


def _save_packages(context: ProgramContext) -> None:
    with suppress(OSError):  # a record alone must not end a run
        save_packages(context.run_dir)


def conclude(context: ProgramContext) -> None:
    """Raise the error that the program's end is, if it is one."""
    ending = context.ending
    context.report.close()
    if ending.code == EXIT_DONE:
        return
    if ending.code == EXIT_PREEMPTED:
        context.events.write("preempted", step=context.newest or 0, saved=context.newest is not None)
        saved = f"; saved at step {context.newest}" if context.newest is not None else ""
        raise Preempted(f"{ending.sentence}{saved}")
    if ending.code == EXIT_USER:
        raise UserError(ending.sentence)
    if may_lack_disk(ending) and not has_room(context.run_dir.root, RECORDS):
        raise OutOfDisk(context.run_dir.root, RECORDS)
    raise (OthersEnded if ending.communication else OrtflowError)(ending.sentence)


class OthersEnded(CommunicationError):
    """The program has ended because that of another rank has."""


def checkpoint(context: ProgramContext) -> None:
    """Nothing is left to be written: a save that is not committed is none, and was reported."""


def monitor(context: ProgramContext) -> None:
    """The record was closed with the program; say if it has no profile that was asked for."""
    window = context.spec.monitor.profile
    if context.leads and window is not None and not attempts(context.run_dir.root):
        warn(
            context.events,
            f"monitor.profile has recorded nothing: the program reports no step {window.first} through ortflow.program",
        )


def export(context: ProgramContext) -> None:
    """Record what the program hands over, if it has made it."""
    if not context.leads or not context.spec.export.enabled:
        return
    path = context.run_dir.root / context.spec.export.path
    if not path.exists():
        return
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    context.events.write("export", path=str(path), files=len(files), bytes=size)


STEPS: tuple[Step[ProgramContext], ...] = (
    Step("configure", configure),
    Step("runtime", runtime),
    Step("shard", shard),
    Step("train", train),
    Step("checkpoint", checkpoint, recurs=True),
    Step("monitor", monitor, recurs=True),
    Step("export", export),
)
