"""The kernels that round parameters on their way and add gradients, on the processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated_cuda import EmulatedCall, from_bytes, needs_emulation, to_bytes
from onnx import TensorProto

from ortflow.workflow.cuda import shards

pytestmark = needs_emulation


class Emulated:
    """Operators whose kernels run here."""

    def __init__(self) -> None:
        self.call = EmulatedCall([], [])
        self.streams: list[int] = []

    def launch(
        self, source: str, function: str, grid: int, block: int, arguments: tuple[Any, ...], *, stream: int
    ) -> None:
        self.streams.append(stream)
        self.call.launch(source, function, grid, block, *arguments)


@pytest.mark.parametrize("kind", [TensorProto.BFLOAT16, TensorProto.FLOAT16])
@pytest.mark.parametrize("count", [1, 3, 64, 1030, 5001])
def test_parameters_are_rounded_to_nearest_even(kind: int, count: int) -> None:
    values = np.random.default_rng(count).normal(size=count).astype(np.float32)
    made: Any = Emulated()
    given, there = made.call.memory(4 * count), made.call.memory(2 * count)
    given.content[:] = values.view(np.uint8)
    shards.rounded(made, made, 5, there.pointer, given.pointer, count, kind)
    expected = from_bytes(to_bytes(values, kind), kind, (count,))
    np.testing.assert_array_equal(from_bytes(there.content, kind, (count,)), expected)
    for memory in made.call.memories:
        memory.check()
    assert made.streams == [5]


@pytest.mark.parametrize("count", [1, 3, 64, 1030])
def test_gradients_are_added(count: int) -> None:
    random = np.random.default_rng(count)
    first, second = (random.normal(size=count).astype(np.float32) for _ in range(2))
    made: Any = Emulated()
    total, more = made.call.memory(4 * count), made.call.memory(4 * count)
    total.content[:], more.content[:] = first.view(np.uint8), second.view(np.uint8)
    shards.added(made, 5, total.pointer, more.pointer, count)
    np.testing.assert_array_equal(total.content.view(np.float32), first + second)
    for memory in made.call.memories:
        memory.check()
