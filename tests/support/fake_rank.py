"""A rank that trains nothing: real processes under a real mpirun that fail by the test's script.

Replaces ortflow.workflow.rank through a wrapper of the interpreter (see `fake_python` in the launcher tests). It
keeps the contract of a rank: log, lock, events, stop flag, exit codes. Its checkpoint is the number in RUN_DIR/saved.
FAKE_SCRIPT is JSON: {attempt: {"rank": r, "step": s, "do": what}}; steps from 1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from ortflow.workflow.rank import die_with_parent, hold_ranks_lock, redirect_output
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.system.disk_space import Notice, OutOfDisk


def main() -> None:
    run = RunDir(Path(sys.argv[1]))
    stop, place, attempt = StopFlag(run.stop_request), Place.from_environment(), int(os.environ["ORTFLOW_ATTEMPT"])
    script = json.loads(os.environ.get("FAKE_SCRIPT", "{}"))
    steps, pause = int(os.environ.get("FAKE_STEPS", "10")), float(os.environ.get("FAKE_PAUSE", "0.02"))
    if script.get(str(attempt), {}).get("do") == "born late":
        # The first rank that gets a signal before its handler is set dies of it, and mpirun kills the others.
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        time.sleep(30)
    stop.install()
    if place.manager != "none":
        die_with_parent()
    redirect_output(run.log(attempt, place.rank))
    hold_ranks_lock(run.ranks_lock)
    events = EventLog(run.events(place.rank), place.rank, attempt)
    events.write("attempt_start", world_size=place.world_size, pid=os.getpid())
    print(f"rank {place.rank} of {place.world_size} begins attempt {attempt}", flush=True)
    act = script.get(str(attempt), {})
    if act.get("step") == 0:
        do(act, place.rank, events, run, None)
    comm = None
    if place.world_size > 1:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    saved = run.root / "saved"
    first = int(saved.read_text()) if saved.exists() else 0
    if first and place.rank == 0:
        events.write("resume", step=first)
    for step in range(first + 1, steps + 1):
        time.sleep(pause)
        if act.get("step") == step:
            do(act, place.rank, events, run, comm)
        asked = stop.reason
        if comm is not None:
            asked = next((one for one in comm.allgather(asked) if one), None)
        if asked and act.get("do") != "deaf":
            if place.rank == 0:
                unfinished = saved.with_name("saved.tmp")
                unfinished.write_text(str(step))
                unfinished.replace(saved)  # tests read it as soon as it is there
                events.write("checkpoint", step=step)
            events.write("preempted", step=step)
            leave(comm, 75)
        events.write("step", step=step, loss=1.0 / step, lr=0.1, grad_norm=1.0, seconds=pause, samples=4, epoch=0)
    events.write("finished", step=steps)
    if act.get("step") == "done":
        comm.Barrier()
        do(act, place.rank, events, run, comm)
    leave(comm, 0)


def do(act: dict, rank: int, events: EventLog, run: RunDir, comm: object) -> None:
    what = act["do"]
    if act.get("rank", rank) != rank:
        return
    print(f"rank {rank} now does {what}", flush=True)
    while "gate" in act and not Path(act["gate"]).exists():
        time.sleep(0.02)
    if what == "sigterm-default":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    elif what.startswith("signal"):
        os.kill(os.getpid(), int(what.split()[1]))
    elif what.startswith("exit"):
        os._exit(int(what.split()[1]))
    elif what.startswith("fail"):
        code = int(what.split()[1])
        events.write("failure", reason=f"rank {rank} is told to fail", exit_code=code)
        if comm is not None:
            comm.Abort(code)
        os._exit(code)
    elif what == "full":
        Notice(run.heartbeat).report(OutOfDisk(run.root, 1))
        os._exit(1)
    elif what == "wait":
        time.sleep(600)
    elif what == "hog":
        held = []
        while True:
            held.append(bytearray(b"x" * (16 << 20)))


def leave(comm: object, code: int) -> None:
    if comm is not None:
        comm.Barrier()
        from mpi4py import MPI

        MPI.Finalize()
    os._exit(code)


main()
