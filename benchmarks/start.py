"""How long a person waits: `--help`, the first step of a run, the first new step after a kill.

    python benchmarks/start.py                        # on the example, in a temporary folder

Prints seconds and, for `--help`, the ratio to starting Python itself; medians of a few runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gpt"
ORTFLOW = [sys.executable, "-m", "ortflow"]


def seconds(command: list[str], folder: Path) -> float:
    """Wall seconds of a command."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def records(folder: Path) -> list[dict[str, Any]]:
    """Rank 0's events; the last line may be in the making."""
    path = folder / "runs" / "gpt" / "events" / "rank-0000.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (FileNotFoundError, ValueError):
        return []


def wait_for(folder: Path, wanted: Callable[[dict[str, Any]], bool], launcher: subprocess.Popen[bytes]) -> float:
    """Unix time of the first event that is wanted."""
    while launcher.poll() is None:
        for record in records(folder):
            if wanted(record):
                return float(record["time"])
        time.sleep(0.02)
    raise SystemExit(f"the run ended with {launcher.returncode} before that")


def run_once(folder: Path) -> tuple[float, float]:
    """Seconds from the command to the first step, and from a kill to the first new step (the back-off is 0)."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    options = ["train.steps=10000", "checkpoint.every_steps=5", "restart.backoff.first=0.0"]
    began = time.time()
    launcher = subprocess.Popen(
        [*ORTFLOW, "run", "gpt/run.yaml", *options], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        first = wait_for(folder, lambda r: r["event"] == "step", launcher) - began
        wait_for(folder, lambda r: r["event"] == "checkpoint", launcher)
        for process in psutil.Process(launcher.pid).children(recursive=True):
            if "ortflow.workflow.rank" in process.cmdline() and "mpi" not in process.name():
                process.kill()
                break
        killed = time.time()
        again = wait_for(folder, lambda r: r["event"] == "step" and r["attempt"] == 1, launcher) - killed
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.wait()
    return first, again


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(EXAMPLE, folder / "gpt", ignore=shutil.ignore_patterns("build", "runs"))
        bare = statistics.median(seconds([sys.executable, "-c", "pass"], folder) for _ in range(3 * rounds))
        reported = statistics.median(seconds([*ORTFLOW, "--help"], folder) for _ in range(3 * rounds))
        print(f"--help: {reported:.3f} s, {reported / bare:.1f} times python itself (target: under 0.3 s)")
        prepared = time.perf_counter()
        subprocess.run(
            [sys.executable, "prepare.py"], cwd=folder / "gpt", check=True, stdout=subprocess.DEVNULL, env=os.environ
        )
        print(f"the example's model and data, made once: {time.perf_counter() - prepared:.1f} s")
        times = [run_once(folder) for _ in range(rounds)]
    print(f"ortflow run to the first step: {statistics.median(t[0] for t in times):.2f} s (target: under 5 s)")
    print(
        f"kill -9 of a rank to the first new step: {statistics.median(t[1] for t in times):.2f} s (target: under 5 s)"
    )


if __name__ == "__main__":
    main()
