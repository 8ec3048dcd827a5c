"""Errors of MPI as one sentence, and the time of its calls. Imports mpi4py only once a call has failed."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

from ortflow.workflow.errors import CommunicationError

P = ParamSpec("P")
T = TypeVar("T")

_CALL = re.compile(r"\b(MPI_\w+)\(")
_PLACE = re.compile(r"^\w+\(\w*\)\.*: *")
"""How MPICH begins each line of its error stack: the function and line."""


class MpiError(CommunicationError):
    """A call of MPI's failed."""


class Call(NamedTuple):
    """A call of MPI's."""

    name: str
    start: float
    """Seconds of `time.perf_counter`."""
    end: float
    bytes: int | None
    """Of the buffer; None for small control messages."""


class CallTime:
    """The time of this process in calls of MPI: it waits there for slower ranks. Only one thread calls MPI."""

    seconds = 0.0
    calls: list[Call] | None = None
    """Each call, while a profile is recorded."""


def mpi_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that calls MPI: it raises MpiError instead of mpi4py's exceptions, and is timed."""

    @functools.wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        begun = time.perf_counter()
        try:
            return method(*arguments, **options)
        except RuntimeError as error:
            from mpi4py import MPI

            if not isinstance(error, MPI.Exception):
                raise
            raise MpiError(sentence(str(error))) from error
        finally:
            ended = time.perf_counter()
            CallTime.seconds += ended - begun
            if CallTime.calls is not None:
                CallTime.calls.append(Call(method.__name__, begun, ended, _bytes_of(arguments)))

    return call


def _bytes_of(arguments: tuple[object, ...]) -> int | None:
    """The size of the buffer among the arguments of a call."""
    for argument in arguments:
        count, dtype = getattr(argument, "count", None), getattr(argument, "dtype", None)
        if isinstance(count, int) and dtype is not None:
            return count * int(dtype.itemsize)
    return None


def sentence(report: str) -> str:
    """One sentence from MPI's report of several lines: the call and the innermost reason. Pure.

    >>> sentence("Other MPI error, error stack:\\nPMPI_Recv(9): MPI_Recv(buf=0x1) failed\\ncopy(2)..: read failed")
    'MPI_Recv failed: read failed; another rank may have ended, see its log'
    """
    lines = [_PLACE.sub("", line).strip() for line in report.splitlines()]
    reasons = [line for line in lines if line and not _CALL.search(line)]
    called = _CALL.search(report)
    name = called.group(1) if called else "MPI"
    reason = reasons[-1] if reasons else "unknown error"
    return f"{name} failed: {reason}; another rank may have ended, see its log"
