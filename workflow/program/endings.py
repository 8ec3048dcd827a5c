"""How a program has ended: exit code and one sentence for people. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_USER, signal_name
from ortflow.workflow.program.advice import advice

TAIL = 8192
"""Bytes of the end of the log in which the program's last error is searched."""
_ERROR = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Stop\w*)): ?(.*)$")
_BARE = re.compile(r"^(?:[\w.]+\.)?([A-Z]\w*(?:Error|Exception|Interrupt))$")
_FULL = re.compile(r"No space left on device|Disk quota exceeded|exit code \d+$")
"""A full disk, or an end without a word: nothing can be printed into a log on it."""
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")
"""An exception of any name, at the end of a traceback."""
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)')
_ARGPARSE = re.compile(r"^\S+: error: (.+)$")
_IMPORTS = ("ModuleNotFoundError", "ImportError", "SyntaxError", "IndentationError", "TabError")
_OTHERS = re.compile(
    r"\b(?:CommitFailed|RunLost)\b|connection (?:was )?(?:closed|reset|refused|aborted)|socket (?:closed|timeout)|"
    r"closed by peer|broken pipe|NCCL|gloo|DistBackendError|DistNetworkError|TCPStore|process group|barrier|timed out|"
    r"UNAVAILABLE|heartbeat",
    re.IGNORECASE,
)
"""Words of errors that a program has because another rank has ended."""
LONGEST = 300
BEGINNING = 60.0
"""Seconds in which wrong arguments and missing modules are found; later, something else has failed."""


@dataclass(frozen=True)
class Ending:
    """The end of one rank's program."""

    code: int
    """ortflow's exit code."""
    sentence: str = ""
    """Why; empty if it is done."""
    communication: bool = False
    """Probably caused by the end of another rank."""


@dataclass(frozen=True)
class Known:
    """What is known about a program when its process has ended."""

    status: int
    """Exit code; minus the signal if one ended it."""
    stop_reason: str | None = None
    """Why it was asked to stop."""
    killed: str | None = None
    """Why ortflow killed it."""
    stepped: bool = False
    """Whether it reported a step in this attempt."""
    finished: bool = False
    """It said that it has done all it should."""
    step: int | None = None
    """Its newest step."""
    total: int | None = None
    """The number of steps that it declared."""
    out_of_memory: bool = False
    """The kernel killed a process for lack of memory meanwhile."""
    tail: str = ""
    """The end of its log."""
    seconds: float = 0.0
    """How long it ran."""
    rejected: str | None = None
    """Why it could not load its checkpoint."""


def ending_of(facts: Known, owner: str) -> Ending:
    """Return how the program of `owner` (`rank 1`) has ended."""
    program = f"the program of {owner}"
    if facts.killed is not None:
        code = EXIT_PREEMPTED if facts.stop_reason else EXIT_FAILURE
        return Ending(code, f"{program} {facts.killed}")
    if facts.status == 0:
        return _exited(facts, program)
    if facts.status < 0:
        return _killed(facts, program, -facts.status)
    # A shell reports 128 + N for its child.
    number = facts.status - 128
    if facts.stop_reason and number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        return Ending(EXIT_PREEMPTED, f"{program} was ended by {signal_name(number)} after the request to stop")
    if number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
        return _killed(facts, program, number)
    if facts.rejected is not None:
        return Ending(EXIT_USER, f"{program} {facts.rejected}")
    said = last_error(facts.tail)
    # torchrun raises SignalException when it has passed the signal on.
    if facts.stop_reason and (said is None or said.startswith("KeyboardInterrupt") or "SignalException" in said):
        return Ending(EXIT_PREEMPTED, f"{program} ended with exit code {facts.status} after the request to stop")
    wrong = (
        not facts.stepped
        and facts.seconds < BEGINNING
        and (facts.status == EXIT_USER or (said or "").startswith(_IMPORTS))
    )
    sentence = f"{program} ended with exit code {facts.status}" + (f": {said}" if said else "")
    communication = said is not None and _OTHERS.search(said) is not None
    if facts.stop_reason and communication:
        # All programs are ending, and one of them was faster.
        return Ending(EXIT_PREEMPTED, f"{sentence}, after the request to stop")
    fix = advice(said or facts.tail)
    return Ending(EXIT_USER if wrong else EXIT_FAILURE, sentence + (f"; {fix}" if fix else ""), communication)


def _exited(facts: Known, program: str) -> Ending:
    """Exit code 0: done, stopped as asked, or too early."""
    complete = facts.total is None or (facts.step or 0) >= facts.total
    if facts.finished or (complete and not facts.stop_reason):
        return Ending(EXIT_DONE)
    if facts.stop_reason:
        if complete and facts.total is not None:
            return Ending(EXIT_DONE)
        return Ending(EXIT_PREEMPTED, f"{program} stopped as asked ({facts.stop_reason})")
    reason = (
        f"{program} ended with exit code 0 at step {facts.step or 0} of {facts.total}, and nothing asked it to stop"
    )
    return Ending(EXIT_FAILURE, f"{reason}; call finished() if it may end early")


def _killed(facts: Known, program: str, number: int) -> Ending:
    name = signal_name(number)
    if facts.stop_reason and number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        return Ending(EXIT_PREEMPTED, f"{program} was ended by {name} after the request to stop")
    memory = " (out of memory)" if facts.out_of_memory and number == signal.SIGKILL else ""
    said = last_error(facts.tail)
    native = number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
    because = f": {said}" if said is not None and native else ""
    communication = because != "" and _OTHERS.search(because) is not None
    return Ending(EXIT_FAILURE, f"{program} was killed by {name}{memory}{because}", communication)


def may_lack_disk(ending: Ending) -> bool:
    """Whether a full disk may have ended the program."""
    return ending.code == EXIT_FAILURE and not ending.communication and _FULL.search(ending.sentence) is not None


def last_error(tail: str) -> str | None:
    """The last `SomethingError: message` of a log, with the place of its traceback; argparse's message; or None."""
    lines = tail.splitlines()
    for place in range(len(lines) - 1, -1, -1):
        line = lines[place]
        if match := _ARGPARSE.match(line):
            return match[1][:LONGEST]
        if _ERROR.match(line) or _BARE.match(line) or (_RAISED.match(line) and _ends_traceback(lines[:place])):
            said = line.strip()[:LONGEST]
            frame = next((hit for back in reversed(lines[:place]) if (hit := _FRAME.match(back))), None)
            return f"{said} ({frame[1]}:{frame[2]})" if frame is not None else said
    return None


def _ends_traceback(lines: list[str]) -> bool:
    """Whether the last of these lines are frames of a traceback, with their source."""
    for line in reversed(lines):
        if not line.startswith("  "):
            return False
        if _FRAME.match(line):
            return True
    return False
