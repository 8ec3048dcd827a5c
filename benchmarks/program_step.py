"""What `run.steps` and `run.log` cost in a step of 5 ms, against the bare loop, side by side.

    python benchmarks/program_step.py              # prints the ratio; under 1.01 is promised

Both loops run in this process and alternate in blocks, so that a change of the machine's speed meets both. A step
computes until 5 ms of this thread's processor time have passed: a machine with other work does not lengthen it. The run
is served by a rank process's server over a real socket, in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

BLOCK = 50
"""Steps of one loop before the other's turn."""


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
    parser.add_argument("--blocks", type=int, default=40)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    with tempfile.TemporaryDirectory() as folder:
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, folder))
        server.start()
        os.environ.update(ours.recv())
        import ortflow.program

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
        for block in range(2 * arguments.blocks):
            name = "run" if block % 4 in (1, 2) else "bare"
            started = time.process_time()
            if name == "bare":
                for _ in itertools.islice(bare, BLOCK):
                    compute(iterations)
            else:
                for batch in itertools.islice(steps, BLOCK):
                    run.log(loss=compute(iterations), tokens=batch)
            times[name].append((time.process_time() - started) / BLOCK)
        ratio = statistics.median(times["run"]) / statistics.median(times["bare"])
        print(f"bare {statistics.median(times['bare']) * 1000:.3f} ms, with run.steps and run.log {ratio:.4f} of it")
        ours.send(None)
        server.join()


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
    started = time.process_time()
    compute(iterations)
    return time.process_time() - started


if __name__ == "__main__":
    main()
