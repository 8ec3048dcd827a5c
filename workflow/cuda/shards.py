"""Nodes that gather parameters one layer ahead and reduce gradients: see `ortflow.workflow.graph.shards.ahead`.

ShardsBegin (token fp32 [1], a value that comes before?) -> token, parameters...: memory into which a gather begins.
ShardsReady (parameters...) -> the same values in the same memory, for the nodes behind it: they have arrived.
ShardsSend (token, gradients fp32..., gradients of the step `held`...) -> token: their reduction begins, and that of the
step `held` is over for all that is queued from then on, so that the memory may be used again.

The kernels round what a rank holds in fp32, and add what it receives; they are queued on a stream beside the graph's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_int64, c_void_p
from math import prod
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.call import Call, Launcher
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import BYTES, source
from ortflow.workflow.device.cudart import WITHIN, Runtime

_THREADS = 256
_BLOCKS = 1056
_VECTOR = 4


@operator()
class ShardsBegin:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._channel, self._number = int(attributes["channel"]), int(attributes["number"])
        self._shapes = list(shapes_of(attributes["dims"]))

    def run(self, call: Call) -> None:
        """Takes memory for the parameters."""
        call.output(0, (1,))
        targets = [call.output(place + 1, shape) for place, shape in enumerate(self._shapes)]
        call.shards(self._channel).begin(self._number, targets)


@operator()
class ShardsReady:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._channel, self._number = int(attributes["channel"]), int(attributes["number"])

    def run(self, call: Call) -> None:
        """Computes nothing; copies where ONNX Runtime has given an output memory of its own."""
        call.shards(self._channel).ready(self._number)
        for place, kind in enumerate(call.types):
            value = call.given(place)
            target = call.output(place, value.shape)
            if target != value.pointer:
                call.copy(target, value.pointer, prod(value.shape) * BYTES[kind])


@operator()
class ShardsSend:
    """See the module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._channel, self._number = int(attributes["channel"]), int(attributes["number"])
        self._given, self._held = int(attributes["given"]), int(attributes["held"])

    def run(self, call: Call) -> None:
        """Computes nothing."""
        call.output(0, (1,))
        pointers = [call.given(place + 1).pointer for place in range(self._given)]
        call.shards(self._channel).send(self._number, pointers, self._held)


def shapes_of(dims: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The shapes in a list of numbers, of each its rank and then its dimensions."""
    place = 0
    while place < len(dims):
        end = place + 1 + int(dims[place])
        yield tuple(int(size) for size in dims[place + 1 : end])
        place = end


def rounded(launcher: Launcher, runtime: Runtime, stream: int, target: int, start: int, count: int, kind: int) -> None:
    """Queue target = start, `count` fp32 elements as elements of type `kind`, on a stream."""
    if kind == TensorProto.FLOAT:
        runtime.copy(target, start, 4 * count, WITHIN, stream)
    else:
        text = source("shards", (("X", kind),), (("VECTOR", _VECTOR),))
        _launch(launcher, text, "round_to", stream, start, target, count)


def added(launcher: Launcher, stream: int, target: int, addend: int, count: int) -> None:
    """Queue target += more, `count` fp32 elements, on a stream."""
    text = source("shards", (("X", TensorProto.FLOAT),), (("VECTOR", _VECTOR),))
    _launch(launcher, text, "add_to", stream, addend, target, count)


def _launch(launcher: Launcher, text: str, name: str, stream: int, source: int, target: int, count: int) -> None:
    blocks = max(1, min(_BLOCKS, -(-count // (_THREADS * _VECTOR))))
    arguments = c_void_p(source), c_void_p(target), c_int64(count)
    launcher.launch(text, name, blocks, _THREADS, arguments, stream=stream)
