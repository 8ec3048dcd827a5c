"""Slows ranks down, or injects a fault into one of them at one step: Python imports this at its start if the folder is
on PYTHONPATH.

SLOW: seconds that a step takes longer, and in how many attempts.
HALT: an event, its step, and the seconds that rank 0 stands still behind it.
SKEW: a module, and the seconds that the clock of processes that run it is ahead.
CLOCKS: a folder; the seconds in its file of a host's name are what that host's clock is ahead, from then on.
HOLD: a phase, and for how many seconds it is held at its beginning, in every attempt.
LENDER: a rank, and after how many tensors that rank 0 reads for the export it is killed, in the first attempt.
CHECK: a rank, and the error that the third graph it runs in the check of the gradient raises.
PRECISE: the check of the gradient opens passes of its own, as on GPUs in half precision.
UNLOCKED: locks hold nobody back, as between the nodes of some file systems.
RESUMED: ranks bring what they hold after a resume into the form of a checkpoint again, and compare its bits.
FAULTS is JSON: {"attempt": a, "rank": r, "step": s, "do": what}; attempt null for all.
"""

import json
import os
import signal
import sys
import time


def inject(what: str) -> None:
    if what == "raise":
        raise RuntimeError("this rank was told to raise")
    if what == "hog":
        held = []
        while True:
            held.append(bytearray(b"x" * (64 << 20)))


def die_lending(tensors: int) -> None:
    from ortflow.workflow.trainer.export.lent_tensors import LentTensors

    whole, sent = LentTensors.pieces_of, [0]

    def pieces(self: LentTensors, *arguments: object) -> object:
        sent[0] += 1
        if sent[0] > tensors:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, *arguments)  # type: ignore[arg-type]

    LentTensors.pieces_of = pieces  # type: ignore[assignment,method-assign]


def fail_in_check(error: str) -> None:
    from ortflow.workflow import errors
    from ortflow.workflow.sessions.binding import Binding
    from ortflow.workflow.trainer.check.checker import ShardsChecker
    from ortflow.workflow.trainer.check.divided_checker import DividedChecker

    kind = getattr(errors, error, RuntimeError)
    for checker in (DividedChecker, ShardsChecker):

        def check(self: object, samples: object, whole: object = checker.check) -> None:
            run, left = Binding.run, [2]

            def failing(self: Binding, **options: bool) -> None:
                if not left[0]:
                    raise kind("injected failure in the check")
                left[0] -= 1
                run(self, **options)

            Binding.run = failing  # type: ignore[method-assign]
            whole(self, samples)  # type: ignore[operator]

        checker.check = check  # type: ignore[assignment,method-assign]


def check_precisely() -> None:
    import copy

    from ortflow.workflow.sessions.session import Sessions

    Sessions.exact = copy.copy  # type: ignore[assignment,method-assign]


def install() -> None:
    from ortflow.workflow.run.events import EventLog

    whole = EventLog.write
    rank = int(os.environ.get("PMI_RANK") or os.environ["PMIX_RANK"])  # MPICH, Open MPI
    attempt = int(os.environ["ORTFLOW_ATTEMPT"])
    seconds, attempts = os.environ.get("SLOW", "0 0").split()
    pause = float(seconds) if attempt < int(attempts) else 0.0
    faults = json.loads(os.environ.get("FAULTS", "{}"))
    mine = bool(faults) and rank == faults["rank"] and faults["attempt"] in (None, attempt)

    halt, at, still = os.environ.get("HALT", "none 0 0").split()
    phase, _, held = os.environ.get("HOLD", "").partition(" ")
    lender, tensors = os.environ.get("LENDER", "-1 0").split()

    def write(self: EventLog, event: str, **fields: object) -> None:
        whole(self, event, **fields)
        if rank == 0 and event == halt and fields.get("step") == int(at):
            time.sleep(float(still))
        if event == "phase_start" and fields["phase"] == phase:
            time.sleep(float(held))
        if event == "phase_start" and fields["phase"] == "export" and rank == int(lender) and attempt == 0:
            die_lending(int(tensors))
        if event == "step":
            time.sleep(pause)
            if mine and fields["step"] == faults["step"]:
                inject(faults["do"])

    EventLog.write = write  # type: ignore[method-assign]
    # Tests read the step at which a fault came in the record, which must have it by then.
    EventLog.write_soon = lambda self, event, row, fields: write(self, event, **fields(row))  # type: ignore[method-assign]


def follow_clock(path: str) -> None:
    clock, ticks, state = time.time, time.monotonic, {"looked": -1.0, "ahead": 0.0}

    def shifted() -> float:
        if ticks() > state["looked"] + 0.5:
            state["looked"] = ticks()
            try:
                with open(path) as file:
                    state["ahead"] = float(file.read() or 0.0)
            except (OSError, ValueError):
                pass
        return clock() + state["ahead"]

    time.time = shifted


if "UNLOCKED" in os.environ:
    import fcntl

    fcntl.flock = lambda *_: None

if "CLOCKS" in os.environ:
    follow_clock(os.path.join(os.environ["CLOCKS"], os.uname().nodename))

if sys.orig_argv[2:3] == [os.environ.get("SKEW", "").partition(" ")[0]]:
    ahead, now = float(os.environ["SKEW"].partition(" ")[2]), time.time
    time.time = lambda: now() + ahead

if sys.orig_argv[1:3] == ["-m", "ortflow.workflow.rank"]:
    if {"FAULTS", "SLOW", "HALT", "HOLD", "LENDER"} & os.environ.keys():
        install()
    if os.environ.get("CHECK", "none none").split()[0] == os.environ.get("PMI_RANK", "none at all"):
        fail_in_check(os.environ["CHECK"].split()[1])
    if "PRECISE" in os.environ:
        check_precisely()
    if "RESUMED" in os.environ:
        from compared_resumes import compare_resumes

        compare_resumes()
