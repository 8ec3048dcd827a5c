"""Run directories as ranks and supervisors leave them, of any size, without running anything."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ortflow.workflow.run.rundir import RunDir

BEGIN = 1_790_000_000.0


def write_run(
    root: Path,
    *,
    steps: int = 60,
    ranks: int = 2,
    kills: int = 1,
    running: bool = False,
    name: str | None = None,
    step_seconds: float = 0.5,
    begin: float = BEGIN,
    slow_rank: int | None = None,
) -> RunDir:
    """A run that was killed `kills` times and has finished, or runs; `slow_rank` waits for its samples."""
    run = RunDir(root)
    (root / "events").mkdir(parents=True)
    run.run_file.write_text(f"name: {name or root.name}\nrun_dir: {root}\nrestart: {{failures: 3, preemptions: 9}}\n")
    run.plan.write_text(json.dumps({"total_steps": steps, "global_batch": 8}))
    each = max(1, steps // (kills + 1))
    every = max(1, each // 4)
    clock, first = begin + 4.0, 1
    records: list[dict[str, Any]] = [{"time": begin, "event": "submit", "launcher": "local"}]
    lines: list[dict[str, Any]] = []
    for attempt in range(kills + 1):
        last = steps if attempt == kills else each * (attempt + 1)
        records.append({"time": clock, "event": "start", "attempt": attempt, "world_size": ranks, "host": "login"})
        start = {"event": "attempt_start", "schema": 1, "world_size": ranks, "pid": 1}
        lines.append({**start, "time": clock + 1, "attempt": attempt})
        for phase in ("configure", "runtime", "shard"):
            lines.append({"event": "phase_start", "time": clock + 1, "attempt": attempt, "phase": phase})
            if phase == "runtime" and attempt:
                spans = [[attempt - 1, clock - 5 - 2 * step_seconds, clock - 5]]
                lost = {"from_step": first + 1, "to_step": first - 1, "seconds": 2 * step_seconds, "spans": spans}
                lines.append({"event": "rewind", "time": clock + 1, "attempt": attempt, **lost})
                resume = {"event": "resume", "step": first - 1, "path": "checkpoints/x", "seconds": 0.5}
                lines.append({**resume, "time": clock + 1.6, "attempt": attempt})
            clock += 1
            lines.append({"event": "phase_end", "time": clock + 1, "attempt": attempt, "phase": phase, "seconds": 1.0})
        clock += 1
        lines.append({"event": "phase_start", "time": clock, "attempt": attempt, "phase": "train"})
        for step in range(first, last + 1):
            clock = round(clock + step_seconds, 6)
            lines.append(
                {"event": "step", "time": clock, "attempt": attempt, "step": step,
                 "loss": 3.0 / math.sqrt(step) + 0.1 * math.sin(step), "lr": 0.001, "grad_norm": 1.0 + math.cos(step),
                 "seconds": step_seconds, "samples": 8, "epoch": step // 20, "data_seconds": 0.001,
                 "comm_seconds": 0.21 * step_seconds}
            )  # fmt: skip
            if step % every == 0:
                lines.append({"event": "checkpoint_start", "time": clock, "attempt": attempt, "step": step})
                done = {"event": "checkpoint", "step": step, "seconds": 0.1, "stall_seconds": 0.0, "bytes": 1000}
                lines.append({**done, "time": clock, "attempt": attempt})
                clock += 0.01
                lines.append(
                    {"event": "evaluation", "time": round(clock + 0.2, 6), "attempt": attempt, "step": step,
                     "samples": 64, "seconds": 0.2, "loss": 2.5 / step, "set/f1": 1 - 1 / step}
                )  # fmt: skip
                clock += 0.2
        first = last + 1
        if attempt < kills:
            clock += 2 * step_seconds
            records.append(
                {"time": clock + 4, "event": "end", "attempt": attempt, "outcome": "failure", "step": last + 2,
                 "rank": 1, "cause": "rank 1 was killed by SIGKILL", "next": "restart",
                 "why": f"failure {attempt + 1} of 3"}
            )  # fmt: skip
            clock += 5
        elif not running:
            lines.append({"event": "phase_end", "time": clock, "attempt": attempt, "phase": "train", "seconds": 1.0})
            lines.append({"event": "memory", "time": clock, "attempt": attempt, "parameters": 10**6, "peak": 10**9})
            lines.append({"event": "finished", "time": clock, "attempt": attempt, "step": steps})
            records.append(
                {"time": clock + 1, "event": "end", "attempt": attempt, "outcome": "finished", "next": "stop"}
            )
    run.attempts.write_text("".join(json.dumps(record) + "\n" for record in records))
    whole = "".join(json.dumps({**line, "rank": 0, "host": "n0"}, separators=(",", ":")) + "\n" for line in lines)
    for rank in range(ranks):
        text = whole.replace('"rank":0,"host":"n0"', f'"rank":{rank},"host":"n{rank // 2}"')
        if rank == slow_rank:
            text = text.replace('"data_seconds":0.001', f'"data_seconds":{step_seconds / 5}')
            text = text.replace(f'"comm_seconds":{0.21 * step_seconds}', '"comm_seconds":0.001')
        run.events(rank).write_text(text)
    return run
