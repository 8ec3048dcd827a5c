"""The steps of `monitor.profile` in a training program: waits for batches, steps, checkpoints, operators.

Called by the library in the user's process if the reply to its greeting has a window. Standard library only; operators
are those of torch's profiler, if the program has imported torch. The lines are those of
`ortflow.workflow.run.profile_records`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from ortflow.program import digests


class Profiler:
    """Writes the record of one rank. An error of the disk ends the profile, never the program."""

    def __init__(self, window: Mapping[str, Any], rank: int, world_size: int) -> None:
        self._first, self._last = int(window["from"]), int(window["to"])
        self._folder, self._rank = str(window["folder"]), rank
        self._header = {"rank": rank, "world_size": world_size, "host": window["host"], "attempt": window["attempt"]}
        self._lines: list[dict[str, Any]] = []
        self._origin = 0.0
        self._active = self._over = False
        self._begun = self._drawn = 0.0
        self._torch: Any = None

    def begin(self, step: int) -> None:
        """A step, counted from 1, begins with its wait for a batch."""
        if not self._active and not self._over and self._first <= step <= self._last:
            self._open(step)
        self._begun = self._drawn = time.perf_counter()

    def drawn(self) -> None:
        """The batch of the step is there."""
        self._drawn = time.perf_counter()

    def done(self, step: int) -> None:
        """A step is done, and the next one begins."""
        now = time.perf_counter()
        if self._active:
            if self._drawn > self._begun:
                self._span("data", "data wait", self._begun, self._drawn)
            self._span("steps", f"step {step}", self._begun, now)
            self._flush()
            if step >= self._last:
                self.end(step)

    def saved(self, start: float) -> None:
        """A checkpoint has been committed that was begun at `start`."""
        if self._active:
            self._span("checkpoint and evaluation", "checkpoint", start, time.perf_counter())

    def end(self, step: int) -> None:
        """The window is over, or the program."""
        if not self._active:
            return
        self._active, self._over = False, True
        if self._torch is not None:
            self._torch.stop()
            self._lines.append({"kind": "nodes", "rows": rows_of(self._torch.key_averages())})
        self._lines.append({"kind": "end", "step": step})
        self._flush()

    def _open(self, step: int) -> None:
        self._active = True
        self._origin = time.perf_counter()
        window = {"kind": "window", "schema": 1, "first": step, "to": self._last, "origin": time.time()}
        self._lines.append({**window, "clock_error": None, "program": True, "device": "", **self._header})
        if digests.torch_module() is not None:
            self._torch = importlib.import_module("torch.profiler").profile(with_flops=True)
            self._torch.start()
        self._flush()

    def _span(self, lane: str, name: str, start: float, end: float) -> None:
        begun, seconds = round(start - self._origin, 9), round(end - start, 9)
        self._lines.append({"kind": "span", "lane": lane, "name": name, "start": begun, "seconds": seconds})

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
        try:
            os.makedirs(self._folder, exist_ok=True)
            with open(f"{self._folder}/rank-{self._rank:04d}.jsonl", "ab", buffering=0) as file:
                if file.write(data) != len(data):
                    raise OSError("no space is left")
        except OSError as error:
            self._active, self._over = False, True
            if self._torch is not None:
                self._torch.stop()
            print(f"ortflow: the profile is not written: {error}", file=sys.stderr)


def rows_of(averages: Any) -> list[dict[str, Any]]:
    """The operators that torch's profiler saw; on GPUs the time of their kernels, which has not been tested."""
    rows = []
    on_gpu = any(getattr(average, "self_device_time_total", 0) for average in averages)
    for average in averages:
        micro = average.self_device_time_total if on_gpu else average.self_cpu_time_total
        if micro > 0:
            rows.append(
                {
                    "step": True, "graph": "torch", "module": "", "operator": str(average.key), "by": "torch",
                    "calls": int(average.count), "seconds": 1e-6 * micro, "bytes": 0, "flops": int(average.flops or 0),
                }
            )  # fmt: skip
    return rows
