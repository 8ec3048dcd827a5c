"""What `run.steps` and `run.log` cost in a step of 5 ms, against the bare loop, side by side.

    python benchmarks/program_step.py              # prints the ratio; under 1.01 is promised

Both loops run in this process and take turns, step by step, so that a change of the machine's speed meets both. Times
are processor times, so that other work on the machine does not count: of the main thread, whose median step is
compared, and of the connection's thread. That one wakes by the clock, and steps take longer on a busy machine. So its
two parts are measured alone: a wake, and sending what undisturbed steps report between two wakes. The run is served
over a real socket by a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))


IDLE_SECONDS = 4.0


def serve(pipe: Any, folder: str) -> None:
    """Serve a run until the pipe is closed."""
    from program_server import ProgramServer

    with ProgramServer(Path(folder)) as server:
        pipe.send(server.environment())
        pipe.recv()


def main() -> None:
    """Measure, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=1000)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as folder:
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, folder))
        server.start()
        os.environ.update(ours.recv())
        import ortflow.program
        from ortflow.program.link import PERIOD

        class Counter:
            """Registered state."""

            def state_dict(self) -> dict[str, int]:
                return {}

            def load_state_dict(self, state: dict[str, int]) -> None:
                pass

        run = ortflow.program.start(counter=Counter())
        iterations = calibrate(arguments.milliseconds / 1000)
        loader = range(10**9)
        bare, steps = iter(loader), iter(run.steps(loader, total=10**9))
        times: dict[str, list[float]] = {"bare": [], "run": []}
        before = other_threads()
        time.sleep(IDLE_SECONDS)
        wake = (other_threads() - before) / (IDLE_SECONDS / PERIOD)
        for _ in range(arguments.steps):
            started = time.thread_time()
            next(bare)
            compute(iterations)
            middle = time.thread_time()
            batch = next(steps)
            run.log(loss=compute(iterations), tokens=batch)
            times["bare"].append(middle - started)
            times["run"].append(time.thread_time() - middle)
        between = max(1, round(PERIOD / (arguments.milliseconds / 1000)))
        thread = (wake + sending(run, between)) / between
        bare_step, step = statistics.median(times["bare"]), statistics.median(times["run"])
        print(
            f"bare {bare_step * 1000:.3f} ms, with run.steps and run.log {step * 1000:.3f} ms "
            f"and {thread * 1e6:.0f} us in the thread: {(step + thread) / bare_step:.4f} of it"
        )
        ours.send(None)
        server.join()


def other_threads() -> float:
    """Processor time of this process's other threads, in seconds."""
    return time.process_time() - time.thread_time()


def sending(run: Any, logs: int) -> float:
    """Processor time for sending so many steps' figures in one piece, in seconds."""
    times = []
    for _ in range(50):
        for number in range(logs):
            run.log(loss=0.5 * number, tokens=number)
        started = time.thread_time()
        run._link.flush()
        times.append(time.thread_time() - started)
    return statistics.median(times)


def compute(iterations: int) -> float:
    """A step."""
    total = 0.0
    for number in range(iterations):
        total += number * 0.5
    return total


def calibrate(seconds: float) -> int:
    """Iterations of a step of this length."""
    compute(100_000)
    fastest = min(_timed(100_000) for _ in range(10))
    return int(100_000 * seconds / fastest)


def _timed(iterations: int) -> float:
    started = time.thread_time()
    compute(iterations)
    return time.thread_time() - started


if __name__ == "__main__":
    main()
