"""Runs of ranks that train nothing, under the real mpirun and the real command line.

`Bench` makes a folder with a run file whose `resources.python` is a wrapper: to run a rank it runs fake_rank.py,
for anything else it is the interpreter of the tests. ORTFLOW_TEST_PYTHON names another interpreter, to test with the
MPI installed beside it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from forks import run_command
from waits import PATIENCE, wait_until

from ortflow.launchers.status import read_status
from ortflow.workflow.run.rundir import RunDir

RANK = Path(__file__).parent / "fake_rank.py"
PYTHON = os.environ.get("ORTFLOW_TEST_PYTHON", sys.executable)
WRAPPER = """#!/bin/sh
if [ "$1" = -m ] && [ "$2" = ortflow.workflow.rank ]; then shift 2; exec {python} {rank} "$@"; fi
exec {python} "$@"
"""


@dataclass
class Bench:
    """A folder to run in."""

    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path) -> Bench:
        python = folder / "python"
        python.write_text(WRAPPER.format(python=shlex.quote(PYTHON), rank=shlex.quote(str(RANK))))
        python.chmod(0o755)
        for name in ("model.onnx", "data.arrow"):
            (folder / name).touch()
        return cls(folder)

    def write(self, ranks: int = 2, **sections: Any) -> None:
        run = {
            "name": "fake",
            "model": {"path": "model.onnx", "loss": "mse"},
            "data": {"train": "data.arrow", "micro_batch": 4},
            "train": {"steps": 10, "optimizer": {"name": "sgd", "lr": 0.1}},
            "monitor": {"every_steps": 1},
            "resources": {"ranks_per_node": ranks, "python": str(self.folder / "python")},
            "restart": {"failures": 2, "backoff": {"first": 0.05, "limit": 1.0}},
        }
        (self.folder / "run.yaml").write_text(yaml.safe_dump({**run, **sections}))

    def environment(self, script: dict[int, dict[str, Any]] | None, **fake: Any) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORTFLOW_", "PMI"))}
        kept["PATH"] = os.pathsep.join([str(Path(PYTHON).parent), kept["PATH"]])
        reported = {f"FAKE_{name.upper()}": str(value) for name, value in fake.items()}
        return {**kept, "FAKE_SCRIPT": json.dumps(script or {}), **reported}

    def start(
        self, *arguments: str, script: dict[int, dict[str, Any]] | None = None, shell: str = "", **fake: Any
    ) -> Running:
        """Start `ortflow ARGUMENTS`, behind a shell command that ends in exec if one is given."""
        command = [sys.executable, "-m", "ortflow", *arguments]
        process = subprocess.Popen(
            ["sh", "-c", shell + shlex.join(command)] if shell else command,
            cwd=self.folder, env=self.environment(script, **fake), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.started.append(process)
        return Running(self, process)

    def run(
        self, *arguments: str, script: dict[int, dict[str, Any]] | None = None, shell: str = "", **fake: Any
    ) -> Done:
        """Start and wait; in a fork if there is no shell command before it."""
        if shell:
            return self.start(*arguments, script=script, shell=shell, **fake).wait()
        done = run_command(
            *arguments, folder=self.folder, environment=self.environment(script, **fake), timeout=PATIENCE
        )
        return Done(done.returncode, done.stdout, done.stderr)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "fake"

    def attempts(self, kind: str) -> list[dict[str, Any]]:
        try:
            lines = (self.run_dir / "attempts.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [record for line in lines if (record := json.loads(line))["event"] == kind]

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        try:
            lines = (self.run_dir / "events" / f"rank-{rank:04d}.jsonl").read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in whole if record["event"] == kind]

    def processes(self) -> list[psutil.Process]:
        """Processes of the run that are still alive."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("ORTFLOW_RUN_DIR") == str(self.run_dir) and process.status() != "zombie":
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def state(self) -> str:
        return read_status(RunDir(self.run_dir)).state.value

    def supervisor(self) -> int:
        pid = read_status(RunDir(self.run_dir)).pid
        assert pid is not None
        return pid

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        for left in self.processes():
            left.kill()


@dataclass
class Done:
    code: int
    out: str
    err: str


@dataclass
class Running:
    bench: Bench
    process: subprocess.Popen[str]

    def wait(self, timeout: float = PATIENCE) -> Done:
        out, err = self.process.communicate(timeout=timeout)
        return Done(self.process.returncode, out, err)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def until(self, condition: Callable[[], Any], timeout: float = PATIENCE) -> None:
        wait_until(condition, timeout, lambda: self.process.poll() is None)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(record["step"] >= step for record in self.bench.events("step")))
