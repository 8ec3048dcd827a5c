"""The executor of a rank: runs the seven steps with one context, and ends the rank.

Called by `rank` after the log is set up. The steps are those of a trainer or of a program; only they are imported.
Ranks exit together when they are done or preempted. A rank that fails ends the others, because they would wait for it
forever.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, CommunicationError, OrtflowError, Preempted
from ortflow.workflow.ranks import Place, node_of
from ortflow.workflow.run.engine import Engine
from ortflow.workflow.run.events import SCHEMA_VERSION, EventLog
from ortflow.workflow.run.fence import Fence
from ortflow.workflow.run.hang import HangWatch
from ortflow.workflow.run.lead import Lead
from ortflow.workflow.run.location import Location
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.spec.checks.nodes import REASON, of_this_attempt
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.run import ProgramRunSpec, RunSpec, TrainerRunSpec
from ortflow.workflow.system.disk_space import Notice, is_full, is_too_large, out_of_disk, too_large

if TYPE_CHECKING:
    from ortflow.workflow.program.context import ProgramContext
    from ortflow.workflow.sinks.process import SinkProcess
    from ortflow.workflow.steps.context import Context

PATIENCE, PATIENCE_ON_GPUS = 10, 60
"""Seconds in which a rank leaves MPI, and NCCL before it: that took more than ten on GPUs that other programs used."""
NOTICE = 2.0
"""Seconds that the process manager has to notice the rank that another rank's call failed for, and to end the others.

An abort in this time would take its place: mpirun would report the abort, and not the rank that was killed.
"""


def execute(
    run_dir: RunDir, place: Place, attempt: int, stop: StopFlag, fence: Fence, location: Location | None = None
) -> int:
    """Run the seven steps; returns the exit code."""
    faulthandler.enable()
    # First of all: the other ranks must find it there when they get so far.
    lead = Lead(run_dir.root, attempt) if place.rank == 0 and place.world_size > 1 else None
    events = EventLog(run_dir.events(place.rank), place.rank, attempt)
    node = node_of(place, os.environ)
    events.write(
        "attempt_start", schema=SCHEMA_VERSION, world_size=place.world_size, host=place.host, pid=os.getpid(),
        **({"node": node} if node != place.host else {}),
    )  # fmt: skip
    context: Context | ProgramContext | None = None
    sinks: SinkProcess | None = None
    hang: HangWatch | None = None
    notice = 0.0
    try:
        full_spec = load_run_file(run_dir.run_file, others=False)
        spec = of_this_attempt(full_spec, os.environ)
        if full_spec.elastic:
            _record_nodes(events, spec, full_spec, place)
        if place.rank == 0 and spec.monitor.sinks:  # the module takes a while to import
            from ortflow.workflow.sinks.process import start_sinks

            sinks = start_sinks(spec, run_dir, attempt, events)
        if isinstance(spec, ProgramRunSpec):
            if lead is not None:
                lead.ready()  # a program's ranks do not use MPI
            from ortflow.workflow.program import steps as of_program
            from ortflow.workflow.program.context import ProgramContext

            _collect_again()
            context = ProgramContext(run_dir, spec, place, attempt, stop, events, fence, location=location)
            context.engine = Engine(of_program.STEPS, events)
            context.engine.run(context)
        else:
            from ortflow.workflow.steps.context import Context
            from ortflow.workflow.steps.order import STEPS

            _collect_again()
            assert isinstance(spec, TrainerRunSpec)
            if spec.restart.hung_seconds is not None:
                stop.watch_for_hangs(hang := HangWatch(spec.restart.hung_seconds))
            context = Context(run_dir, spec, place, attempt, stop, events, fence, location=location, lead=lead)
            context.engine = Engine(STEPS, events)
            context.engine.run(context)
        events.write("finished", step=context.progress.step)
        code = EXIT_DONE
    except Preempted as error:
        print(error, flush=True)
        code = error.exit_code
    except CommunicationError as error:
        if context is not None and context.spec.program is not None:
            print(f"error: {error}", flush=True)
        else:
            traceback.print_exc()
        events.write("failure", reason=str(error), exit_code=error.exit_code, communication=True)
        code, notice = error.exit_code, NOTICE
    except OrtflowError as error:
        print(f"error: {error}", flush=True)
        if is_full(error):
            Notice(run_dir.heartbeat).report(out_of_disk(error, default=run_dir.root), fatal=True)
        events.write("failure", reason=str(error), exit_code=error.exit_code)
        code = error.exit_code
    except OSError as error:
        code = _failed_on_disk(error, events, run_dir)
    except Exception as error:  # noqa: BLE001 - any exception must be recorded, and must end the other ranks
        traceback.print_exc()
        events.write("failure", reason=f"{type(error).__name__}: {error}", exit_code=EXIT_FAILURE)
        code = EXIT_FAILURE
    gc.enable()
    if hang is not None:
        stop.watch_for_hangs(None)
        hang.end()
    monitor = getattr(context, "monitor", None)  # of a trainer's run, once its step `runtime` has made it
    if monitor is not None:
        with suppress(OSError):
            monitor.close()
    finish(context, together=code in (EXIT_DONE, Preempted.exit_code), code=code, notice=notice)
    if sinks is not None:
        sinks.end(code)
    with suppress(OSError):
        events.close()
    return code


def _collect_again() -> None:
    """End the pause of garbage collection in which `rank` imports; what is imported by now is not looked through."""
    gc.freeze()
    gc.enable()


def _record_nodes(events: EventLog, spec: RunSpec, full_spec: RunSpec, place: Place) -> None:
    """The nodes and ranks of this attempt of an elastic run."""
    shares = {"gradient_accumulation": spec.accumulation} if isinstance(spec, TrainerRunSpec) else {}
    events.write(
        "elastic", nodes=spec.resources.nodes, of_nodes=full_spec.resources.nodes, world_size=place.world_size,
        **shares, reason=os.environ.get(REASON, ""),
    )  # fmt: skip


def _failed_on_disk(error: OSError, events: EventLog, run_dir: RunDir) -> int:
    """Report an OSError: a file or disk by its name; an error without a name is a bug, with its traceback."""
    if is_full(error):
        lack = out_of_disk(error, default=run_dir.root)
        Notice(run_dir.heartbeat).report(lack, fatal=True)
        print(f"error: {lack}", flush=True)
        events.write("failure", reason=str(lack), exit_code=EXIT_FAILURE)
        return EXIT_FAILURE
    if is_too_large(error):
        limit = too_large(error.filename or run_dir.root)
        print(f"error: {limit}", flush=True)
        with suppress(OSError):  # the record may be the file that is too large
            events.write("failure", reason=str(limit), exit_code=limit.exit_code)
        return limit.exit_code
    reason = f"{error.filename}: {error.strerror}" if error.filename else f"{type(error).__name__}: {error}"
    if error.filename is None:
        traceback.print_exc()
    else:
        print(f"error: {reason}", flush=True)
    events.write("failure", reason=reason, exit_code=EXIT_FAILURE)
    return EXIT_FAILURE


def finish(context: Context | ProgramContext | None, *, together: bool, code: int, notice: float = 0.0) -> None:
    """Leave MPI: in order with the others, or aborting them after `notice` seconds."""
    if context is None or context.comm is None:
        return
    if together:
        context.comm.barrier()
    else:
        context.clock.sleep(notice)
    # MPI_Finalize holds Python's lock, and waits forever if its process manager has died: the kernel ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE_ON_GPUS if together and context.spec.on_gpus else PATIENCE)
    if not together:
        context.comm.abort(code)
    context.comm.close()
    signal.alarm(0)
