"""Times of the nodes of a rank's sessions, for some steps only. Used by `monitor.profile`.

ONNX Runtime (1.19 to 1.32) can only record from the opening of a session to `end_profiling`. So a second session of the
same graph is opened when a recording begins, and runs in the place of the first one until it ends. Both have the same
options, and compute the same bits; the weights are inputs, so that the second one takes little memory.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ortflow.workflow.graph.ir.modules import module_of, modules_in
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.run.operator_records import RUN, Limits, Node
from ortflow.workflow.sessions.flops import flops_of

_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose results are in the memory of their inputs."""
NO_MODULES: Mapping[str, str] = {}
MOST_ENTRIES = 1_000_000
"""ONNX Runtime drops what comes after so many; release 1.19 makes three of a run of a node."""
_NODE = "_kernel_time"
"""How it ends the name of a node's record; `_fence_before` and `_fence_after` are of no length."""


class Session(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A session whose runs another one can take over."""

    graph = ""
    """Name of its graph: `train`, `optimizer`."""
    content: Path | bytes = b""
    """The graph."""
    again: Callable[[str], onnxruntime.InferenceSession]
    """Opens a session of the same graph that records, to files whose names begin with the argument."""
    recorder: onnxruntime.InferenceSession | None = None
    """The session that runs in the place of this one."""

    def run_with_iobinding(self, iobinding: Any, run_options: Any = None) -> None:
        """Run the graph; see ONNX Runtime."""
        if self.recorder is None:
            super().run_with_iobinding(iobinding, run_options)
        else:
            # Values are bound to the graph's inputs and outputs, which are the same. The public method refuses a
            # binding of another session (in Python, from 1.2x on); the runtime itself does not.
            self.recorder._sess.run_with_iobinding(iobinding._iobinding, run_options)


class Moment:
    """The same moment on three clocks."""

    def __init__(self) -> None:
        self._counter, self._wall, self._monotonic = time.perf_counter(), time.time_ns(), time.monotonic_ns()

    def clock(self, start: int) -> Callable[[float], float]:
        """Maps seconds since `start`, in ns of the profiler's clock, to those of `perf_counter`.

        The profiler has C++'s high_resolution_clock: the time of day with libstdc++, the monotonic clock elsewhere.
        """
        begun = self._counter + 1e-9 * min(start - self._wall, start - self._monotonic, key=abs)
        return lambda seconds: begun + seconds


class SessionRecording:
    """The recorders of some sessions, from now on until `end`."""

    def __init__(self, sessions: Iterable[Session], limits: Callable[[], Limits | None]) -> None:
        """`limits` measures the machine's.

        Raises what ONNX Runtime does when a session cannot be opened, and OSError; nothing is recorded then."""
        self._limits = limits
        self._folder = tempfile.TemporaryDirectory(prefix="ortflow-profile-")
        self._sessions: list[Session] = []
        self._clocks: list[Callable[[float], float]] = []
        try:
            for number, session in enumerate(sessions):
                before = Moment()
                recorder = session.again(str(Path(self._folder.name, f"{number}")))
                self._clocks.append(before.clock(recorder.get_profiling_start_time_ns()))
                session.recorder = recorder
                self._sessions.append(session)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End without a result."""
        for session in self._sessions:
            session.recorder = None
        self._sessions = []
        self._folder.cleanup()

    def limits(self) -> Limits | None:
        """See the protocol."""
        return self._limits()

    def end(self) -> list[Node]:
        """What was recorded, in the order of its start. Raises OSError or ValueError if the records cannot be read."""
        nodes: list[Node] = []
        try:
            for session, clock in zip(self._sessions, self._clocks, strict=True):
                recorder, session.recorder = session.recorder, None
                assert recorder is not None
                path = Path(recorder.end_profiling())
                nodes += nodes_of(path.read_bytes(), session.graph, clock, modules_in(session.content))
        finally:
            self.cancel()
        return sorted(nodes, key=lambda node: node.start)


def nodes_of(
    records: bytes, graph: str, clock: Callable[[float], float], modules: Mapping[str, str] = NO_MODULES
) -> list[Node]:
    """The nodes and runs in a file of ONNX Runtime's profiler; `clock` maps its seconds to those of `perf_counter`.

    Raises ValueError if the file is incomplete, as on a full disk, or because the profiler takes no more entries.
    """
    nodes = []
    entries = json.loads(records.decode("utf-8", errors="replace"))
    if len(entries) >= MOST_ENTRIES:
        raise ValueError("ONNX Runtime records at most a million entries of a graph; record fewer steps")
    for record in entries:
        category, name = record.get("cat"), str(record.get("name", ""))
        start, seconds = clock(1e-6 * float(record.get("ts", 0))), 1e-6 * float(record.get("dur", 0))
        details = record.get("args") or {}
        if category == "Session" and name == RUN:
            nodes.append(Node(graph, RUN, "", RUN, start, seconds))
        elif category == "Node" and name.endswith(_NODE):
            name = name.removesuffix(_NODE)
            size = sum(int(details.get(key) or 0) for key in ("activation_size", "parameter_size", "output_size"))
            operator = str(details.get("op_name", ""))
            inputs, outputs = _shapes(details, "input"), _shapes(details, "output")
            if operator in _VIEWS:
                size = 0
            nodes.append(
                Node(
                    graph, name, modules.get(name) or module_of(name), operator, start, seconds,
                    str(details.get("provider", "")), size, flops_of(operator, inputs, outputs), inputs,
                )
            )  # fmt: skip
        elif category == "Kernel":  # of a GPU, where onnxruntime was built with CUPTI
            nodes.append(Node(graph, name, module_of(name), str(details.get("op_name", "")), start, seconds, "CUPTI"))
    return nodes


def _shapes(record: Mapping[str, Any], which: str) -> tuple[tuple[int, ...], ...]:
    """Shapes of `input` or `output` as the profiler writes them: `[{"float": [2, 3]}, …]`."""
    return tuple(tuple(shape) for value in record.get(f"{which}_type_shape") or () for shape in value.values())
