"""Where the ranks of an attempt that hangs are, by the stacks that each has written to its log (`workflow/run/hang.py`,
and `workflow/program/stacks.py` for programs)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ortflow import workflow
from ortflow.launchers.attempts.source_line import SourceLine, mpi_call, source_line
from ortflow.launchers.attempts.tail import last_bytes
from ortflow.workflow.run.hang import PROGRAM_STACKS
from ortflow.workflow.run.rundir import RunDir

TAIL = 256 << 10
"""Bytes of a log that are searched, from its end."""
MOST_RANKS = 4
"""Ranks of one place that are named."""
_HEADER = re.compile(rf"^(?:Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!|{re.escape(PROGRAM_STACKS)})$", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_PY_SPY = re.compile(r"^Process \d+: ", re.MULTILINE)
_PY_SPY_THREAD = re.compile(r"^Thread \S+ \([^)]*\)(?:: .*)?$", re.MULTILINE)
_PY_SPY_FRAME = re.compile(r"^    (\S.*) \((.*):(\d+)\)$", re.MULTILINE)
_MAIN = re.compile(r"^Thread \S+ \([^)]*\): \"MainThread\"$", re.MULTILINE)
_COMMUNICATION = (
    "workflow/comm/",
    "workflow/run/lead.py",
    "torch/distributed/",
    "horovod/",
    "deepspeed/comm/",
    "mpi4py/",
)
_JAX = (
    "jax/experimental/multihost_utils.py",
    "jax/_src/distributed.py",
    "jax/_src/interpreters/pxla.py",
    "jax/_src/array.py",
)
"""Where JAX meets other processes, and where it runs a computation of all or waits for its result."""
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3")
"""Parts of the paths of files that are not the program's."""
_OWN = os.path.join(os.path.dirname(workflow.__file__ or "?"), "")
_BACKWARD = ("torch/autograd/graph.py", "_engine_run_backward")
"""Where a program waits for other ranks within a backward pass: DistributedDataParallel sums gradients there."""


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    source: str = field(default="", compare=False)
    """The text of the line, if its file can be read."""

    @property
    def communicates(self) -> bool:
        """Whether it belongs to a call to the other ranks."""
        file = self.file.replace(os.sep, "/")
        return any(part in file for part in (*_COMMUNICATION, *_JAX)) or self.in_backward

    @property
    def of_the_program(self) -> bool:
        """Whether it is in neither a package nor Python's library."""
        return not (self.communicates or self.file.startswith(("<", _OWN)) or any(p in self.file for p in _LIBRARIES))

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" + (f": {self.source}" if self.source else "")

    @property
    def in_backward(self) -> bool:
        """Whether it is PyTorch's backward pass."""
        return self.function == _BACKWARD[1] and self.file.replace(os.sep, "/").endswith(_BACKWARD[0])


Stack = tuple[Frame, ...]
"""Frames of a rank's main thread, the innermost first."""


def stack_in(log: str) -> Stack | None:
    """The newest stack in a log; None if there is none. Pure."""
    headers = list(_HEADER.finditer(log))
    if not headers:
        return None
    text = log[headers[-1].end() :]
    if _PY_SPY.search(text) is not None:
        # A process that has not imported `threading` has no names of threads.
        main = _MAIN.search(text) or _PY_SPY_THREAD.search(text)
        rest = _PY_SPY_THREAD.split(text[main.end() :])[0] if main is not None else ""
        return tuple(Frame(file, int(line), name) for name, file, line in _PY_SPY_FRAME.findall(rest)) or None
    threads = _THREAD.split(text)[1:]
    # faulthandler writes the threads from the newest to the oldest, which is the main one.
    frames = [(match[1], int(match[2]), match[3]) for match in _FRAME.finditer(threads[-1])] if threads else []
    return tuple(Frame(*frame) for frame in frames) or None


def stacks_of(run: RunDir, attempt: int, world_size: int) -> dict[int, Stack | None]:
    """The newest stack of each rank; None where a rank has written none."""
    logs = {rank: last_bytes(run.log(attempt, rank), TAIL).decode(errors="replace") for rank in range(world_size)}
    read: dict[tuple[str, int], SourceLine] = {}
    return {rank: None if (stack := stack_in(log)) is None else _with_source(stack, read) for rank, log in logs.items()}


def _with_source(stack: Stack, read: dict[tuple[str, int], SourceLine]) -> Stack:
    """The stack with the text of the program's innermost line; mpi4py is compiled, and has no frames but its calls."""
    place = next((n for n, frame in enumerate(stack) if frame.of_the_program), None)
    if place is None:
        return stack
    frame = stack[place]
    if (frame.file, frame.line) not in read:
        read[frame.file, frame.line] = source_line(frame.file, frame.line)
    line = read[frame.file, frame.line]
    frame_with_source = replace(frame, source=line.text)
    call = mpi_call(line) if place == 0 else None
    inner = (Frame("mpi4py/MPI", 0, call),) if call is not None else ()
    return (*inner, *stack[:place], frame_with_source, *stack[place + 1 :])


def where(stacks: Mapping[int, Stack | None]) -> str:
    """In which call the ranks are, those that keep the others waiting last; empty if nothing is known. Pure."""
    if not any(stacks.values()):
        return ""
    waiting: dict[str, list[int]] = defaultdict(list)
    elsewhere: dict[str, list[int]] = defaultdict(list)
    silent = [rank for rank, stack in stacks.items() if stack is None]
    for rank, stack in stacks.items():
        if stack is None:
            continue
        if stack[0].communicates:
            waiting[_call(stack)].append(rank)
        else:
            elsewhere[f"{stack[0].function} ({stack[0]})"].append(rank)
    parts = [f"{_ranks(ranks)} wait{_s(ranks)} for other ranks in {call}" for call, ranks in waiting.items()]
    parts += [f"{_ranks(ranks)} {_are(ranks)} in {place}" for place, ranks in elsewhere.items()]
    if silent:
        parts.append(f"{_ranks(silent)} do{'es' if len(silent) == 1 else ''} not respond")
    return "; ".join(parts)


def waited_for(stacks: Mapping[int, Stack | None]) -> tuple[int, ...]:
    """The ranks for which the others wait: those that are in no call to other ranks; empty if nobody waits. Pure."""
    waiting = [rank for rank, stack in stacks.items() if stack is not None and stack[0].communicates]
    return tuple(sorted(set(stacks) - set(waiting))) if waiting else ()


def _call(stack: Stack) -> str:
    """The call to other ranks, and where the program makes it."""
    public = (frame.function for frame in stack if frame.communicates and not frame.function.startswith("_"))
    name = "backward" if stack[0].in_backward else next(public, None)
    if name is None:
        name = "a computation of JAX" if _in_jax(stack[0]) else stack[0].function
    frame = next((frame for frame in stack if frame.of_the_program), None)
    return name if frame is None or not frame.source else f"{name} ({frame})"


def _in_jax(frame: Frame) -> bool:
    return any(part in frame.file.replace(os.sep, "/") for part in _JAX)


def _ranks(ranks: list[int]) -> str:
    shown = [str(rank) for rank in ranks[:MOST_RANKS]]
    rest = len(ranks) - len(shown)
    *first, last = [*shown, f"{rest} more"] if rest else shown
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def _s(ranks: list[int]) -> str:
    return "s" if len(ranks) == 1 else ""


def _are(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
