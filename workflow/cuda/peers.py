"""Kernels with which the GPUs of one machine wait for each other and add up what they have copied: see peers.cu.

Used by `trainer.peer_sums`. None takes part in a graph of ONNX Runtime's.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_void_p

from ortflow.workflow.cuda.operators import Operators
from ortflow.workflow.cuda.source import source

_THREADS, _VECTOR, _WARP = 256, 4, 32
_BLOCKS = 1056
"""Thread blocks of a sum at most, eight for each multiprocessor of an H100: a sum that is soon over delays the backward
pass less than one that leaves multiprocessors free (docs/benchmarks.md)."""


class PeerKernels:
    """Those of one rank. `step` is the address of the number of its current step, u32."""

    def __init__(self, operators: Operators, rank: int, ranks: int, step: int) -> None:
        self._operators, self._step = operators, step
        numbers = ("RANKS", ranks), ("RANK", rank), ("VECTOR", _VECTOR)
        self._source = source("peers", (), numbers)

    def next_step(self, stream: int) -> None:
        """Queue the beginning of the next step."""
        self._launch("next_step", stream, 1, _WARP, c_void_p(self._step))

    def notify(self, stream: int, flags: int, place: int) -> None:
        """Queue a signal to all other ranks. `flags`: address of a table with the addresses of their flags."""
        self._launch("notify", stream, 1, _WARP, c_void_p(self._step), c_void_p(flags), c_int(place))

    def wait_for(self, stream: int, flags: int, first: int, last: int, stop: int) -> None:
        """Queue a wait for the signals of places [first, last), which also ends when the number at `stop` is not 0."""
        places = c_int(first), c_int(last)
        self._launch("wait_for", stream, 1, _WARP, c_void_p(self._step), c_void_p(flags), *places, c_void_p(stop))

    def add_up(self, stream: int, mine: int, others: int, apart: int, count: int) -> None:
        """Queue the sum of `count` fp32 elements of all ranks, those of others `apart` elements from one another."""
        blocks = max(1, min(_BLOCKS, -(-count // (_THREADS * _VECTOR))))
        pointers = c_void_p(mine), c_void_p(others)
        self._launch("add_up", stream, blocks, _THREADS, *pointers, c_int64(apart), c_int64(count))

    def _launch(self, name: str, stream: int, grid: int, block: int, *arguments: c_void_p | c_int | c_int64) -> None:
        self._operators.launch(self._source, name, grid, block, arguments, stream=stream)
