"""How soon a program prints its first line under ortflow and under torchrun, and how soon a request to stop is saved.

    python benchmarks/program_start.py             # under 0.5 s more than torchrun is promised

The two take turns, two ranks each, so that a change of the machine's speed meets both. Then two ranks with steps of a
second are asked to stop at random moments: the checkpoint must be committed within the step that is
under way and the time of the saving. Prints medians and the worst case with the machine's load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST = "import os\nprint('first line of rank', os.environ['RANK'], flush=True)\n"
STEP, SAVING = 1.0, 0.2
STEPS = f"""
import time
import ortflow.program

run = ortflow.program.context()
for step in range(1000):
    if run.should_stop:
        with run.commit(step) as folder:
            time.sleep({SAVING})
            (folder / f"rank-{{run.rank}}").write_text(str(step))
        break
    time.sleep({STEP} - time.time() % {STEP})  # both ranks together, as with a collective call
    run.step(step + 1)
    if step == 0:
        print("steps", flush=True)
"""
MODULES = {
    "ortflow": ("ortflow", "run", "train.py", "--ranks", "2"),
    "torchrun": ("torch.distributed.run", "--nproc-per-node", "2", "train.py"),
}


def start(name: str, folder: Path) -> subprocess.Popen[str]:
    """Start the program under a launcher."""
    return subprocess.Popen(
        [sys.executable, "-m", *MODULES[name]], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def until(process: subprocess.Popen[str], text: str) -> float:
    """Wait for a line with this text; returns the time."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return time.perf_counter()
    raise SystemExit("".join(seen))


def first_line(name: str) -> float:
    """Seconds to the first line of output."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(FIRST)
        begun = time.perf_counter()
        process = start(name, Path(folder))
        seconds = until(process, "first line of rank") - begun
        process.communicate()
    return seconds


def stop(chance: random.Random) -> float:
    """Seconds from the signal to the commit."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(STEPS)
        process = start("ortflow", Path(folder))
        until(process, "steps")
        time.sleep(chance.uniform(0.0, STEP))
        asked = time.time()
        process.send_signal(signal.SIGTERM)
        process.communicate()
        events = (Path(folder) / "runs/train/events/rank-0000.jsonl").read_text().splitlines()
        commits = [record["time"] for record in map(json.loads, events) if record["event"] == "checkpoint"]
    return float(commits[-1]) - asked


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    for name in MODULES:
        first_line(name)  # compiles modules
    taken: dict[str, list[float]] = {name: [] for name in MODULES}
    for number in range(rounds):
        for name in sorted(MODULES, reverse=number % 2 == 1):
            taken[name].append(first_line(name))
    more = statistics.median(a - b for a, b in zip(taken["ortflow"], taken["torchrun"], strict=True))
    medians = ", ".join(f"{name} {statistics.median(times):.2f} s" for name, times in taken.items())
    print(f"first line of output: {medians}; {more:+.2f} s (target: under +0.5 s)")
    chance = random.Random(0)
    waits = [stop(chance) for _ in range(rounds)]
    limit = STEP + SAVING
    print(
        f"signal to commit, steps of {STEP:g} s, saving {SAVING:g} s: median {statistics.median(waits):.2f} s, "
        f"worst {max(waits):.2f} s (target: under {limit:g} s and the work of ortflow)"
    )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
