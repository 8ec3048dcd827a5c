"""What all monitoring costs in a step of 5 ms of an ONNX run, against the bare loop, side by side.

    python benchmarks/monitoring.py               # prints the ratio; under 1.01 is the aim

Monitoring is what rank 0 does after each step: the event, TensorBoard's scalars, the line in the log every ten steps,
the measurement of memory, and the question whether a profile begins. Both loops run in this process and take turns,
in blocks of 0.2 s, so that a change of the machine's speed meets both. Times are processor times of all threads: other
work on the machine counts only as far as it empties caches, which it does. What is written by the clock, events every
0.2 s and scalars every 5 s, is written at the end of each block, which is 0.2 s of steps: a process that gets a seventh
of a core would write seven times as often in its processor time. The ratio is the median over pairs of blocks, which a
few disturbed blocks do not change; its error and the machine's load are printed beside it. For programs there is
benchmarks/program_step.py.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from program_step import calibrate, compute

from ortflow.workflow.memory import peak
from ortflow.workflow.ranks import Place
from ortflow.workflow.run import events
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.steps import monitor as monitoring
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


def ratios(bare: Callable[[], None], monitored: Callable[[], None], pairs: int) -> tuple[list[float], list[float]]:
    """Of each pair of blocks, processor seconds of the bare one, and the monitored one's as a share of it.

    Every other pair begins with the monitored block, so that what grows or falls meanwhile is in neither's favour.
    """
    seconds, shares = [], []
    for pair in range(pairs):
        times = {}
        for block in (bare, monitored) if pair % 2 == 0 else (monitored, bare):
            begun = time.process_time()
            block()
            times[block] = time.process_time() - begun
        seconds.append(times[bare])
        shares.append(times[monitored] / times[bare])
    return seconds, shares


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of blocks")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        context = context_in(Path(name))
        events.PERIOD = monitoring.SCALARS_SECONDS = 1e9
        monitor = context.monitor = Monitor(context)
        monitor.begin()
        profiler = profiler_of(context, 10**9)
        assert profiler is not None
        iterations = calibrate(arguments.milliseconds / 1000)
        outcome = StepOutcome(0.5123456789, 1.0, 4, np.zeros(3, np.float32), None)
        step = 0

        def bare() -> None:
            for _ in range(arguments.steps):
                compute(iterations)

        def monitored() -> None:
            nonlocal step
            for _ in range(arguments.steps):
                step += 1
                profiler.before(step)
                compute(iterations)
                context.progress.step = step
                monitor.step(outcome, lr=1e-3, seconds=0.005, epoch=0, tokens=512, data_seconds=1e-4, comm_seconds=1e-4)
                profiler.after(step)
            context.events.flush()
            monitor.flush()

        monitored()  # opens files, starts threads
        before, stolen = os.getloadavg()[0], time.monotonic()
        seconds, shares = ratios(bare, monitored, arguments.pairs)
        share_of_core = 2 * sum(seconds) / (time.monotonic() - stolen)
        monitor.close()
    low, middle, high = statistics.quantiles(shares, n=4)
    step_time = statistics.median(seconds) / arguments.steps
    print(
        f"bare step {step_time * 1000:.3f} ms; monitored {middle:.4f} of it, {(middle - 1) * step_time * 1e6:+.0f} us "
        f"(middle half of {arguments.pairs} pairs: {low:.4f} to {high:.4f}; error of the median about "
        f"{1.25 * (high - low) / 1.35 / arguments.pairs**0.5:.4f}); load {before:.1f}, {share_of_core:.0%} of a core; "
        f"peak {peak() / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
