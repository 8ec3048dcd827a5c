"""What all monitoring costs in a step of 5 ms of an ONNX run, against the bare loop, side by side.

    python benchmarks/monitoring.py               # prints the ratio; under 1.01 is the aim

Monitoring is what rank 0 does after each step: the event, TensorBoard's scalars, the line in the log every ten steps,
the measurement of memory, and the question whether a profile begins. Both loops run in this process and take turns,
step by step, so that a change of the machine's speed meets both. Times are processor times, so that other work on the
machine does not count: of the main thread, whose median and mean step are compared, and of all other threads. For
programs there is benchmarks/program_step.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from program_step import calibrate, compute

from ortflow.workflow.events import EventLog
from ortflow.workflow.memory import peak
from ortflow.workflow.ranks import Place
from ortflow.workflow.rundir import RunDir
from ortflow.workflow.signals import StopFlag
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.monitor import Monitor
from ortflow.workflow.steps.profile import profiler_of
from ortflow.workflow.trainer import StepOutcome

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))


def context_in(folder: Path) -> Context:
    """A run of one rank whose profile begins long after the benchmark's steps."""
    from run_files import spec_of

    spec = spec_of(monitor={"profile": {"from": 10**8, "to": 10**8 + 9}})
    run_dir = RunDir(folder)
    run_dir.events(0).parent.mkdir()
    context = Context(
        run_dir, spec, Place(0, 1, 0, 1, "none", "here"), 0, StopFlag(), EventLog(run_dir.events(0), 0, 0)
    )
    context.plan = SimpleNamespace(  # type: ignore[assignment]
        total_steps=10**9, world_size=1, replicas=1, global_batch=4, micro_batch=4, gradient_accumulation=1
    )
    context.trainer = SimpleNamespace(device_memory=dict)  # type: ignore[assignment]
    return context


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        context = context_in(Path(name))
        monitor = context.monitor = Monitor(context)
        monitor.begin()
        profiler = profiler_of(context, 10**9)
        assert profiler is not None
        iterations = calibrate(arguments.milliseconds / 1000)
        outcome = StepOutcome(0.5123456789, 1.0, 4, np.zeros(3, np.float32), None)
        times: dict[str, list[float]] = {"bare": [], "monitored": []}
        others = time.process_time() - time.thread_time()
        for step in range(1, arguments.steps + 1):
            started = time.thread_time()
            compute(iterations)
            middle = time.thread_time()
            profiler.before(step)
            compute(iterations)
            context.progress.step = step
            monitor.step(outcome, lr=1e-3, seconds=0.005, epoch=0, tokens=512, data_seconds=1e-4, comm_seconds=1e-4)
            profiler.after(step)
            times["bare"].append(middle - started)
            times["monitored"].append(time.thread_time() - middle)
        thread = (time.process_time() - time.thread_time() - others) / arguments.steps
        monitor.close()
    bare, monitored = statistics.median(times["bare"]), statistics.median(times["monitored"])
    excess = statistics.fmean(times["monitored"]) - statistics.fmean(times["bare"])
    print(
        f"bare {bare * 1000:.3f} ms, monitored {monitored * 1000:.3f} ms and {thread * 1e6:.0f} us in other threads: "
        f"{(monitored + thread) / bare:.4f} of it; on average {excess * 1e6:+.0f} us; peak {peak() / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
