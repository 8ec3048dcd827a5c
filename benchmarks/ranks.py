"""Two ranks on two cores against one rank on the same cores, and what the all-reduce costs.

    python benchmarks/ranks.py [RUN_FILE] [--steps 30 --rounds 2]

Trains the run file's model (by default examples/gpt, made first if it is not there) through `ortflow run`, once with
one rank and twice the micro-batch, once with two ranks: the same global batch, the same cores. The seconds of a step
are those of the events, the first five left out. Then two ranks sum a buffer as large as the run's gradients and do
nothing else. Prints medians and ratios; the configurations take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.spec.file.load import load_run_file

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt" / "run.yaml"
WARM_UP = 5
CALLS = 30


def train(run_file: Path, runs: Path, ranks: int, micro_batch: int, steps: int) -> tuple[list[float], int]:
    """Seconds of each step after the warm-up, on rank 0, and the number of trained elements."""
    name = f"ranks-{ranks}"
    done = subprocess.run(
        [sys.executable, "-m", "ortflow", "run", str(run_file), "--fresh", f"run_dir={runs / name}",
         f"resources.ranks_per_node={ranks}", f"data.micro_batch={micro_batch}", f"train.steps={steps}",
         "train.schedule.warmup_steps=0", "data.eval_samples=16", "export.enabled=false"],
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the run with {ranks} rank(s) ended with exit code {done.returncode}")
    lines = (runs / name / "events" / "rank-0000.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    seconds = [event["seconds"] for event in events if event["event"] == "step"][WARM_UP:]
    graphs = json.loads((runs / name / "graphs" / "graphs.json").read_text())
    return seconds, FlatIndex.from_json(graphs["index"]).trained


def measure_all_reduce(count: int) -> list[float]:
    """Seconds of each all-reduce of `count` fp32 elements over two ranks, after the warm-up."""
    # mpirun of the environment's own MPI lies beside its Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["mpirun", "-n", "2", sys.executable, __file__, "--all-reduce", str(count)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path})
    return [float(word) for word in done.stdout.split()]


def all_reduce(count: int) -> None:
    """What each of the ranks that `measure_all_reduce` starts does; rank 0 prints."""
    world = MpiCommunicator()
    buffer = CpuDevice().allocate(count, np.float32)
    seconds = []
    for _ in range(WARM_UP + CALLS):
        world.barrier()
        start = time.perf_counter()
        world.all_reduce(buffer)
        seconds.append(time.perf_counter() - start)
    if world.rank == 0:
        print(*seconds[WARM_UP:])
    world.close()


def main() -> None:
    """Run both configurations in turns, then the all-reduce; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path, nargs="?", default=EXAMPLE)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--all-reduce", type=int, metavar="ELEMENTS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.all_reduce:
        all_reduce(options.all_reduce)
        return
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} of the warm-up")
    micro_batch = load_run_file(options.run_file).data.micro_batch
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for ranks in seconds:
                more, count = train(options.run_file, Path(folder), ranks, 2 * micro_batch // ranks, options.steps)
                seconds[ranks] += more
    one, two = (statistics.median(values) for values in seconds.values())
    reduce = statistics.median(measure_all_reduce(count))
    print(f"one rank, two cores     {1e3 * one:8.1f} ms a step")
    print(f"two ranks, one core each{1e3 * two:8.1f} ms a step")
    print(f"all-reduce of {4e-6 * count:.0f} MB    {1e3 * reduce:8.1f} ms = {100 * reduce / two:.1f}% of a step")
    print(f"two ranks / one rank = {two / one:.2f}")


if __name__ == "__main__":
    main()
