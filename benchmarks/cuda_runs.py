"""Whole runs of a GPT on NVIDIA GPUs through the command line: what checkpoints, a restart and a kill cost.

    python benchmarks/cuda_runs.py [checkpoint start kill] [--layers 12 --width 768 --heads 12 --context 1024
        --vocabulary 50304 --batch 8 --precision bf16]

`checkpoint`: steps that a run with a checkpoint of the whole state every `--every` steps loses against one without any,
by turns, as a share of all steps and of the time that the checkpoints take to be written. `start`: seconds from the
command to the first step, for a new run and for one that continues from a checkpoint in the graphs of the first.
`kill`: two ranks on two GPUs; seconds from kill -9 of one to the end of the attempt, and to the first new step.
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
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "gpt"
ORTFLOW = [sys.executable, "-m", "ortflow"]
WARM_UP = 10
"""Steps of each run that are not counted."""


class Runs:
    """A folder with model, data and run files."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._folder, self._options = folder, options
        sizes = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "heads", "context", "vocabulary")]
        subprocess.run(
            [sys.executable, str(EXAMPLE / "model.py"), "--output", str(folder / "m.onnx"), *sizes], check=True
        )
        text = f"{sysconfig.get_paths()['stdlib']}/*.py"
        where = ["--length", str(options.context), "--eval-fraction", "0.02", "--output", str(folder / "text")]
        command = ["data", "convert", text, "--text", *where]
        subprocess.run([*ORTFLOW, *command], check=True, stdout=subprocess.DEVNULL)

    def start(self, name: str, steps: int, ranks: int = 1, **checkpoint: Any) -> subprocess.Popen[bytes]:
        """Start `ortflow run`; a run of that name continues."""
        run = {
            "name": name,
            "run_dir": str(self.directory(name)),
            "model": {"path": str(self._folder / "m.onnx"), "loss": "cross_entropy"},
            "data": {
                "train": {
                    "path": str(self._folder / "text" / "train.arrow"),
                    "columns": {"tokens": "tokens[:-1]", "labels": "tokens[1:]"},
                },
                "micro_batch": self._options.batch,
                "last_batch": "drop",
            },
            "train": {
                "steps": steps,
                "precision": "fp32" if self._options.cpu else self._options.precision,
                "optimizer": {"name": "adamw", "lr": 1e-4},
                "schedule": {"name": "constant"},
                "clip_norm": 1.0,
            },
            "checkpoint": {"keep": {"newest": 1}, **checkpoint},
            "export": {"enabled": False},
            "resources": {"ranks_per_node": ranks, "gpus_per_rank": int(not self._options.cpu)},
            "restart": {"backoff": {"first": 0.0, "limit": 0.0}},
        }
        file = self._folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run))
        log = open(self._folder / f"{name}.log", "ab")  # noqa: SIM115
        return subprocess.Popen([*ORTFLOW, "run", str(file)], stdout=log, stderr=log, cwd=self._folder)

    def directory(self, name: str) -> Path:
        """The run's directory."""
        return self._folder / "runs" / name

    def finish(self, name: str, running: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        """Wait for the end of a run; rank 0's events."""
        if running.wait(600):
            said = (self._folder / f"{name}.log").read_text()[-3000:]
            logs = "".join(path.read_text()[-3000:] for path in self.directory(name).rglob("rank-*.log"))
            raise SystemExit(f"the run {name} ended with {running.returncode}\n{said}\n{logs}")
        return self.events(name)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Rank 0's events; the last line may be in the making."""
        found = []
        path = self.directory(name) / "events" / "rank-0000.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return found

    def wait_for(
        self, name: str, running: subprocess.Popen[bytes], wanted: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """The first event that is wanted."""
        while running.poll() is None:
            for record in self.events(name):
                if wanted(record):
                    return record
            time.sleep(0.02)
        raise SystemExit(f"the run {name} ended before: {(self._folder / f'{name}.log').read_text()[-3000:]}")


def checkpoint(runs: Runs, options: argparse.Namespace) -> None:
    """Steps lost to checkpoints."""
    times: dict[str, list[float]] = {"with": [], "without": []}
    saves: list[dict[str, Any]] = []
    for turn in range(options.turns):
        for kind in ("without", "with"):
            name, every = f"{kind}-{turn}", options.every if kind == "with" else None
            records = runs.finish(name, runs.start(name, options.steps, every_steps=every))
            steps = [record for record in records if record["event"] == "step"]
            # Until the last step, whose checkpoint the end of the run waits for.
            times[kind].append(steps[-1]["time"] - steps[WARM_UP]["time"])
            saves += [record for record in records if record["event"] == "checkpoint"][:-1] if kind == "with" else []
            if kind == "with":
                shutil.rmtree(runs.directory(name) / "checkpoints")
    fast, slow = statistics.median(times["without"]), statistics.median(times["with"])
    size = saves[0].get("bytes", 0) if saves else 0
    count = len(saves) / options.turns
    written = statistics.median(record["seconds"] for record in saves)
    step = fast / (options.steps - WARM_UP - 1)
    print(
        f"{options.steps} steps of {1e3 * step:.2f} ms, a checkpoint every {options.every} "
        f"({size / 1e9:.2f} GB, written in {written:.2f} s): {fast:.3f} s without, {slow:.3f} s with; lost "
        f"{(slow - fast) / fast:.2%} of the steps, {1e3 * (slow - fast) / count:.1f} ms a checkpoint, "
        f"{(slow - fast) / count / written:.2%} of the time in which it is written; runs without: "
        f"{', '.join(f'{each:.3f}' for each in times['without'])}, with: "
        f"{', '.join(f'{each:.3f}' for each in times['with'])}",
        flush=True,
    )


def start(runs: Runs, options: argparse.Namespace) -> None:
    """Seconds to the first step, of a new run and of one that continues."""
    for number, steps in enumerate((20, 40, 60)):
        begun = time.time()
        records = runs.finish("start", runs.start("start", steps, every_steps=20))
        first = next(r for r in records if r["event"] == "step" and r["attempt"] == number)
        kind = "first start" if not number else "start from a checkpoint"
        print(f"{kind}, command to first step: {first['time'] - begun:.2f} s", flush=True)


def kill(runs: Runs, options: argparse.Namespace) -> None:
    """Kill -9 of a rank."""
    for number in range(options.turns):
        name = f"kill-{number}"
        running = runs.start(name, 100_000, ranks=2, every_steps=50)
        try:
            runs.wait_for(name, running, lambda record: record["event"] == "checkpoint")
            path = runs.directory(name) / "events" / "rank-0001.jsonl"
            other = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
            pid = next(record["pid"] for record in other if record["event"] == "attempt_start")
            os.kill(pid, signal.SIGKILL)
            killed = time.time()
            pids = [runs.events(name)[0]["pid"]] if "pid" in runs.events(name)[0] else []
            pids = [r["pid"] for r in runs.events(name) if r["event"] == "attempt_start"] or pids
            while any(_alive(each) for each in pids):
                time.sleep(0.01)
            ended = time.time()
            again = runs.wait_for(name, running, lambda r: r["event"] == "step" and r["attempt"] == 1)
            print(
                f"kill -9 of rank 1 of 2: the other rank has ended after {ended - killed:.2f} s, first new step after "
                f"{again['time'] - killed:.2f} s",
                flush=True,
            )
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(120)


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def main() -> None:
    """What is asked for."""
    work = {"checkpoint": checkpoint, "start": start, "kill": kill}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(work), metavar="|".join(work))
    for name, value in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocabulary", 50304)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("batch", 8), ("steps", 600), ("every", 200), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, for a trial of this program")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        runs = Runs(Path(folder), options)
        for name in options.what:
            work[name](runs, options)


if __name__ == "__main__":
    main()
