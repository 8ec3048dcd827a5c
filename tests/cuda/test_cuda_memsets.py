"""A captured graph whose small memsets became kernels, on a real GPU."""

from __future__ import annotations

import numpy as np

from ortflow.workflow.cuda.memsets import memsets_as_kernels
from ortflow.workflow.cuda.operators import Operators
from ortflow.workflow.device.cuda import CudaDevice

COUNT = 1_000_003


def test_memsets_and_kernels_write_the_same(device: CudaDevice) -> None:
    runtime, stream, beside = device.here(), device.stream, device.here().stream()
    compiler = Operators(device).compiler
    values = np.arange(COUNT, dtype=np.float32)
    first, second, small = (device.allocate(COUNT, np.float32) for _ in range(3))
    forked, joined = runtime.event(), runtime.event()
    device.synchronize()
    for edits in (False, True):
        runtime.begin_capture(stream)
        first.copy_from(second)
        runtime.record(forked, stream)
        runtime.after(beside, forked)
        runtime.zero(small.pointer, 4 * COUNT, beside)
        for place in range(20):
            first.slice(place, place + 1).fill(0)
            first.slice(100 * place + 100, 100 * place + 150).fill(0)
        runtime.record(joined, beside)
        runtime.after(stream, joined)
        small.slice(0, 10).copy_from(first.slice(15, 25))
        graph = runtime.end_capture(stream)
        assert sum(runtime.node_type(node) == 2 for node in runtime.nodes(graph)) == 41
        if edits:
            assert memsets_as_kernels(compiler, graph) == 40
            assert sum(runtime.node_type(node) == 2 for node in runtime.nodes(graph)) == 1
        made = runtime.instantiate(graph)
        for turn in range(3):
            second.write(values + turn)
            small.write(values)
            runtime.launch(made, stream)
            expected = values + turn
            expected[:20] = 0
            for place in range(20):
                expected[100 * place + 100 : 100 * place + 150] = 0
            np.testing.assert_array_equal(first.read(), expected)
            np.testing.assert_array_equal(small.read(), [*expected[15:25], *np.zeros(COUNT - 10)])
        runtime.forget_graph(graph, made)
