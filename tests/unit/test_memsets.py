"""Small memsets of captured graphs become kernels that write the same bytes, between the same nodes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from emulated_cuda import EmulatedCall, needs_emulation

from ortflow.workflow.cuda import memsets
from ortflow.workflow.cuda.memsets import LARGEST, memsets_as_kernels
from ortflow.workflow.cuda.source import source
from ortflow.workflow.errors import OrtflowError

KERNEL, MEMSET = 0, 2


class Driver:
    """The driver's graphs: nodes with their types, memsets with their numbers, and edges.

    `lossy` are nodes whose edges have more data than their ends; `failing` are functions that fail.
    """

    def __init__(self, nodes: dict[int, Any], edges: set[tuple[int, int]], lossy: tuple[int, ...] = ()) -> None:
        self.nodes, self.edges, self.lossy, self.failing = nodes, edges, lossy, ""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        failing = name.startswith("cu") and name == super().__getattribute__("failing")
        return (lambda *arguments: 1) if failing else found

    def _list(self, found: list[int], place: Any, count: Any) -> int:
        count._obj.value = len(found)
        for i, node in enumerate(found if place is not None else ()):
            place[i] = node
        return 0

    def cuGraphGetNodes(self, graph: Any, place: Any, count: Any) -> int:  # noqa: N802
        assert graph.value == 5
        return self._list(list(self.nodes), place, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        found = self.nodes[node.value]
        kind._obj.value = MEMSET if isinstance(found, tuple) else found if isinstance(found, int) else KERNEL
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, place: Any) -> int:  # noqa: N802
        found = place._obj
        found.target, found.value, found.element, found.width, found.height = self.nodes[node.value]
        return 0

    def cuGraphNodeGetDependencies(self, node: Any, place: Any, count: Any) -> int:  # noqa: N802
        if node.value in self.lossy:
            return 918
        return self._list(sorted(a for a, b in self.edges if b == node.value), place, count)

    def cuGraphNodeGetDependentNodes(self, node: Any, place: Any, count: Any) -> int:  # noqa: N802
        return self._list(sorted(b for a, b in self.edges if a == node.value), place, count)

    def cuGraphAddKernelNode(self, made: Any, graph: Any, before: Any, count: Any, kernel: Any) -> int:  # noqa: N802
        made._obj.value = max(self.nodes) + 1
        given = kernel._obj
        assert (given.function, list(given.grid), list(given.block), given.shared) == (9, [1] * 3, [128, 1, 1], 0)
        kinds = ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int
        arguments = [kind.from_address(given.arguments[i]).value for i, kind in enumerate(kinds)]
        self.nodes[made._obj.value] = arguments
        self.edges |= {(before[i], made._obj.value) for i in range(count.value)}
        return 0

    def cuGraphAddDependencies(self, graph: Any, first: Any, second: Any, count: Any) -> int:  # noqa: N802
        self.edges |= {(first[i], second[i]) for i in range(count.value)}
        return 0

    def cuGraphDestroyNode(self, node: Any) -> int:  # noqa: N802
        del self.nodes[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}
        return 0


class Compiler:
    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def function(self, text: str, name: str) -> ctypes.c_void_p:
        assert f"void {name}(" in text
        return ctypes.c_void_p(9)


def test_a_kernel_has_the_place_of_a_small_memset() -> None:
    nodes = {
        1: "kernel",
        2: (4096, 0xFFFFFFFE, 4, 3, 1),
        3: "kernel",
        4: "kernel",
        5: (8192, 7, 1, LARGEST + 1, 1),
        6: (256, 7, 2, 8, 2),
        7: (512, 0, 1, 4, 1),
        8: (1024, 1, 2, 1, 1),
    }
    driver = Driver(nodes, {(1, 2), (4, 2), (2, 3), (2, 5), (3, 6), (6, 7)}, lossy=(8,))
    assert memsets_as_kernels(Compiler(driver), 5) == 2
    made = {node: found for node, found in driver.nodes.items() if isinstance(found, list)}
    assert sorted(made.values()) == [[512, 0, 1, 4], [4096, -2, 4, 12]]
    one, other = sorted(made, key=lambda node: -made[node][0])
    assert driver.edges == {(1, one), (4, one), (one, 3), (one, 5), (3, 6), (6, other)}
    assert set(driver.nodes) - set(made) == {1, 3, 4, 5, 6, 8}, "large, two-dimensional and unclear ones stay"


@pytest.mark.parametrize("name", ["cuGraphAddKernelNode", "cuGraphAddDependencies", "cuGraphDestroyNode"])
def test_a_failure_is_an_error(name: str) -> None:
    driver = Driver({1: (4096, 0, 1, 4, 1), 2: "kernel"}, {(1, 2)})
    driver.failing = name
    with pytest.raises(OrtflowError, match=r"a memset of a CUDA graph cannot be replaced \(error 1\)"):
        memsets_as_kernels(Compiler(driver), 5)


@pytest.mark.parametrize("allocates", [10, 11])
def test_graphs_that_allocate_memory_stay(allocates: int) -> None:
    driver = Driver({1: (4096, 0, 1, 4, 1), 2: allocates}, {(1, 2)})
    assert memsets_as_kernels(Compiler(driver), 5) == 0
    assert driver.nodes.keys() == {1, 2}


def test_another_driver_changes_nothing() -> None:
    assert memsets_as_kernels(Compiler(object()), 5) == 0


@needs_emulation
@pytest.mark.parametrize(("element", "count"), [(1, 1), (1, 300), (2, 6), (4, 4), (4, LARGEST)])
def test_the_kernel_writes_what_the_memset_would(element: int, count: int) -> None:
    call = EmulatedCall([], [])
    memory = call.memory(count)
    value = 0x9ABCDEF8
    call.launch(
        source("memsets", ()), "set_bytes", 1, memsets._THREADS, ctypes.c_void_p(memory.pointer),
        ctypes.c_int(ctypes.c_int32(value).value), ctypes.c_int(element), ctypes.c_int(count),
    )  # fmt: skip
    expected = np.frombuffer(value.to_bytes(4, "little")[:element] * (count // element), np.uint8)
    np.testing.assert_array_equal(memory.content, expected)
