"""Divides work over processes of this machine, and gives the results in the order that one process would.

Item k comes from rank k % N: a rank makes its items in order and waits until they are read, so that memory does not
grow with their number. Used by `predict` and `evaluate`. `python -m ortflow.workflow.inference.ranks` is such a
process: it reads its job, a pickle of its parent, from standard input, and writes items to standard output.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any, Protocol

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.system.cores import grant_of_this_process
from ortflow.workflow.system.module_process import start_module

_LENGTH = 8
_ENDED = 10.0
"""Seconds that a rank has to end after its last item."""


class Job(Protocol):
    """What each rank does; can be pickled."""

    def items(self, rank: int, world_size: int, threads: int) -> Iterator[Any]:
        """Make the items `rank`, `rank + world_size`, …"""


def in_order(job: Job, world_size: int) -> Iterator[Any]:
    """The items of a job, in order. Raises the UserError of a rank, or OrtflowError if one dies."""
    threads = max(1, len(grant_of_this_process("").cores) // world_size)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            process = start_module(__name__, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            ranks.append(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as pipe:
                _write(pipe, (job, rank, world_size, threads))
        number = 0
        while True:
            process = ranks[number % world_size]
            kind, value = _read(process, number % world_size)
            if kind == "end":
                break
            if kind == "error":
                message, location, fix = value
                raise UserError(message, where=location, fix=fix)
            yield value
            number += 1
        # Another rank may have failed behind its last item.
        for place, process in enumerate(ranks):
            with suppress(subprocess.TimeoutExpired):  # all of its items are there
                if process.wait(_ENDED):
                    raise _died(place, process)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _read(process: subprocess.Popen[bytes], rank: int) -> tuple[str, Any]:
    assert process.stdout is not None
    head = process.stdout.read(_LENGTH)
    if len(head) == _LENGTH:
        length = int.from_bytes(head, "little")
        data = process.stdout.read(length)
        if len(data) == length:
            reply: tuple[str, Any] = pickle.loads(data)
            return reply
    process.wait()
    raise _died(rank, process)


def _died(rank: int, process: subprocess.Popen[bytes]) -> OrtflowError:
    code = process.returncode
    ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return OrtflowError(f"rank {rank} {ending}; use fewer --ranks if memory is short")


def _write(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(len(data).to_bytes(_LENGTH, "little"))
    pipe.write(data)
    pipe.flush()


def main() -> int:
    """Do this rank's part of the job."""
    # Ctrl-C ends the parent, which ends this process; what the job prints must not be among the items.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    length = int.from_bytes(sys.stdin.buffer.read(_LENGTH), "little")
    job, rank, world_size, threads = pickle.loads(sys.stdin.buffer.read(length))
    with suppress(BrokenPipeError):
        try:
            for item in job.items(rank, world_size, threads):
                _write(out, ("item", item))
        except UserError as error:
            _write(out, ("error", (error.what, error.where, error.fix)))
            return 0
        _write(out, ("end", None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
