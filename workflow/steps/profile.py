"""Records the steps of `monitor.profile` on every rank. Called by the loop of step `train`; must not change a run.

Outside of the window nothing is recorded, and nothing is called in a step. A rank that cannot write warns and goes on:
it still takes part in what all ranks do together.
"""

from __future__ import annotations

import gzip
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.mpi_errors import CallTime
from ortflow.workflow.run import profile_records as profile
from ortflow.workflow.run.operator_records import RUN, Limits, Node, Recording
from ortflow.workflow.spec.profile import ProfileWindow
from ortflow.workflow.steps.context import Context
from ortflow.workflow.trainer_protocol.capabilities import Profiling

PINGS = 20
MOST_NODES = 200_000
"""Runs of nodes of a rank that are written to the trace; the table has all."""
LANES = {"checkpoint": profile.OTHER, "evaluation": profile.OTHER, "data wait": profile.DATA}
"""What the engine reports -> its lane; the report of a step, `monitor`, takes microseconds and is left out."""


class Profiler:
    """Records the steps of a window from where the run is; see the module."""

    def __init__(self, context: Context, window: ProfileWindow, total: int) -> None:
        self._context, self._window = context, window
        self._opens = window.first - 1
        self._recording: Recording | None = None
        self._lines: list[dict[str, Any]] = []
        self._steps: list[tuple[float, float]] = []
        self._active, self._failed = False, False
        self._counts = False
        """Whether what is recorded is part of the window."""
        self._origin, self._begun = 0.0, 0.0
        self._folder = profile.folder_of(context.run_dir.root, context.attempt)
        if window.first > total and context.leads:
            message = f"monitor.profile.from is {window.first}, and the run has {total} steps: nothing is recorded"
            context.monitor.warn(message)

    def before(self, step: int) -> None:
        """Called before each step; begins the window, also in its middle after a restart. Collective then.

        One step earlier the recorders are opened, because the first run of a session takes longer than others.
        """
        if step < self._opens:
            return
        if not self._active and step <= self._window.to:
            self._open()
        if self._active and not self._counts and step >= self._window.first:
            self._begin(step)

    def after(self, step: int) -> None:
        """Called after each step; ends the window. Collective then."""
        if self._counts:
            self._flush()
            if step >= self._window.to:
                self.end(step)

    def _open(self) -> None:
        self._active = True
        try:
            if isinstance(trainer := self._context.trainer, Profiling):
                # ONNX Runtime records from the opening of a session on, so these are further sessions of the graphs.
                self._recording = trainer.record()
        except Exception as problem:  # noqa: BLE001 - ONNX Runtime's errors are only defined in its package
            self._context.monitor.warn(f"operators are not recorded: {problem}")

    def _begin(self, step: int) -> None:
        context = self._context
        self._counts = True
        self._origin, offset, error = aligned(context.world, time.perf_counter)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            self._give_up(problem)
        self._write(
            kind="window", schema=1, rank=context.place.rank, world_size=context.place.world_size,
            host=context.place.host, attempt=context.attempt, first=step, to=self._window.to, time=time.time(),
            clock_offset=offset, clock_error=error, micro_batch=context.plan.micro_batch,
            gradient_accumulation=context.plan.gradient_accumulation, device=context.environment.get("device", ""),
            exchanges_in_passes=context.spec.divides or context.spec.parallel.zero == 3,
            precision=context.spec.train.precision,
        )  # fmt: skip
        self._flush()
        CallTime.calls, context.engine.observer = [], self._observe
        self._begun = time.perf_counter()

    def _observe(self, name: str, start: float, end: float) -> None:
        """What the engine times; its clock and `perf_counter` differ by a constant, if at all."""
        lane = profile.STEP if name.startswith("step ") else LANES.get(name)
        if lane is None:
            return
        shift = time.perf_counter() - self._context.engine.clock.monotonic()
        if lane == profile.STEP:
            self._steps.append((start + shift, end + shift))
        self._span(lane, name, start + shift, end + shift)

    def _span(self, lane: str, name: str, start: float, end: float, **extra: Any) -> None:
        begun, seconds = round(start - self._origin, 9), round(max(0.0, end - start), 9)
        self._write(kind="span", lane=lane, name=name, start=begun, seconds=seconds, **extra)

    def _write(self, **fields: Any) -> None:
        self._lines.append(fields)

    def _flush(self) -> None:
        """Append what has been recorded."""
        if CallTime.calls is not None:
            for call in CallTime.calls:
                extra = {} if call.bytes is None else {"bytes": call.bytes}
                self._span(profile.COLLECTIVE, call.name, call.start, call.end, **extra)
            CallTime.calls = []
        lines, self._lines = self._lines, []
        if self._failed:
            return
        try:
            profile.append(profile.record_of(self._folder, self._context.place.rank), lines)
        except (OSError, ValueError) as problem:
            self._give_up(problem)

    def _give_up(self, problem: Exception) -> None:
        self._failed = True
        self._context.monitor.warn(f"the profile is not written: {problem}")

    def _stop(self) -> list[Node]:
        """Record nothing any more. Returns the runs of nodes."""
        self._active = self._counts = False
        CallTime.calls = None
        self._context.engine.observer = None
        recording, self._recording = self._recording, None
        if recording is None:
            return []
        try:
            return [node for node in recording.end() if node.start >= self._begun]
        except (OSError, ValueError) as problem:
            self._context.monitor.warn(f"the profile has no operators: {problem}")
            return []

    def end(self, step: int) -> None:
        """End the window after `step`, if it is open: write the table and the trace. Collective."""
        if not self._counts:
            self._stop()
            return
        context, begun = self._context, time.perf_counter()
        recording = self._recording
        self._flush()
        nodes = self._stop()
        if nodes:
            self._write(kind="nodes", rows=rows_of(nodes, self._steps))
            self._write_nodes(nodes)
        limits: Limits | None = None
        context.world.barrier()  # all ranks measure at the same time: they share memory and cores in steps, too
        try:
            limits = recording.limits() if recording is not None else None
        except Exception as problem:  # noqa: BLE001
            context.monitor.warn(f"the machine's limits are not measured: {problem}")
        if limits is not None:
            self._write(kind="limits", **limits._asdict())
        if context.leads:
            self._write(kind="work", flops=self._flops())
        self._write(kind="end", step=step)
        self._flush()
        successes = context.world.gather(not self._failed)
        if not context.leads:
            return
        path = None
        try:
            if successes and any(successes):
                path = profile.write_trace(self._folder)
        except OSError as problem:
            self._give_up(problem)
        spent = time.perf_counter() - begun
        if path is not None:
            context.events.write("profile", step=step, path=str(path), seconds=round(spent, 6))
            print(f"profile of steps up to {step}: {path}; `ortflow profile` shows its table", flush=True)

    def _flops(self) -> int | None:
        """The model's operations in a step over all ranks; None if they are not known."""
        spec, plan = self._context.spec, self._context.plan
        try:
            once = trainer.flops() if isinstance(trainer := self._context.trainer, Profiling) else None
        except Exception as problem:  # noqa: BLE001 - the shape inference of ONNX has errors of several types
            self._context.monitor.warn(f"the model's operations are not counted: {problem}")
            return None
        return None if once is None else once * plan.gradient_accumulation * spec.replicas

    def _write_nodes(self, nodes: Sequence[Node]) -> None:
        if self._failed:
            return
        path = profile.nodes_of(self._folder, self._context.place.rank)
        try:
            if len(nodes) > MOST_NODES:
                message = (
                    f"the trace of rank {self._context.place.rank} has {MOST_NODES} of {len(nodes)} runs of operators"
                )
                self._context.monitor.warn(f"{message}; record fewer steps (the table has all)")
            with gzip.open(path, "wb", compresslevel=1) as file:
                for node in nodes[:MOST_NODES]:
                    file.write(profile.line_of(_line(node, self._origin)))
        except OSError as problem:
            path.unlink(missing_ok=True)
            self._give_up(problem)


def _line(node: Node, origin: float) -> dict[str, Any]:
    start, seconds = round(node.start - origin, 9), round(node.seconds, 9)
    if node.operator == RUN:
        return {"kind": "node", "name": node.graph, "start": start, "seconds": seconds}
    return {
        "kind": "node", "name": node.operator, "start": start, "seconds": seconds, "node": node.name,
        "module": node.module, "bytes": node.bytes, "shapes": [list(shape) for shape in node.inputs],
        "by": node.provider,
    }  # fmt: skip


def rows_of(nodes: Sequence[Node], steps: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """Calls, seconds, bytes and operations by graph, module and operator, within and outside of steps.

    `steps` are the times of steps, in order.
    """
    starts = [start for start, _ in steps]
    sums: dict[tuple[bool, str, str, str], list[Node]] = defaultdict(list)
    for node in nodes:
        place = bisect(starts, node.start) - 1
        within = place >= 0 and node.start <= steps[place][1]
        sums[within, node.graph, node.module, node.operator].append(node)
    rows = []
    for (within, graph, module, operator), runs in sums.items():
        flops = [run.flops for run in runs]
        counts = [count for count in flops if count is not None]
        rows.append(
            {
                "step": within, "graph": graph, "module": module, "operator": operator, "by": runs[0].provider,
                "calls": len(runs), "seconds": round(sum(run.seconds for run in runs), 9),
                "bytes": sum(run.bytes for run in runs),
                "flops": sum(counts) if len(counts) == len(runs) else None,
            }
        )  # fmt: skip
    return rows


def aligned(world: Communicator, clock: Callable[[], float]) -> tuple[float, float, float]:
    """The common zero on this rank's clock, this clock's offset from rank 0's, and the largest error of the offset.

    Rank 0's question and the answers of all enclose the time at which a rank reads its clock (Cristian 1989); of some
    rounds, the shortest counts. An offset that is not larger than its error is taken for none, as between ranks of one
    machine. Collective.
    """
    best: list[tuple[float, float]] = [(0.0, float("inf"))] * world.world_size
    for _ in range(PINGS if world.world_size > 1 else 1):
        question = clock()
        world.broadcast_object(None)
        read = world.gather(clock())
        answer = clock()
        for rank, reading in enumerate(read or ()):
            error = (answer - question) / 2
            if error < best[rank][1]:
                best[rank] = (reading - (question + answer) / 2, error)
    best[0] = (0.0, 0.0)
    zero: float
    zero, offsets = world.broadcast_object((clock(), best))
    offset, error = offsets[world.rank]
    if abs(offset) <= error:
        offset = 0.0
    return zero + offset, round(offset, 9), round(error, 9)


def profiler_of(context: Context, total: int) -> Profiler | None:
    """The recorder of a run's window; None if it has none, or is behind it."""
    window = context.spec.monitor.profile
    if window is None or context.progress.step >= window.to:
        return None
    return Profiler(context, window, total)
