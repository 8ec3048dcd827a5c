"""A user's folder at a site with Grid Engine, and the commands typed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launching import Bench
from project import command, environment

from ortflow.workflow.run.rundir import RunDir

PATIENCE = 300.0
"""Seconds after which a condition counts as never met. Grid Engine polls, and other tests compute beside it."""

SCRIPTS = Path(__file__).parents[1] / "testbeds" / "gridengine"


@contextmanager
def grid_engine(folder: Path, number: int) -> Iterator[dict[str, str]]:
    """A Grid Engine in this folder, the process's `number`-th. Yields the variables that select it."""
    port = str(30000 + os.getpid() % 1000 * 10 + 2 * number)
    try:
        up = subprocess.run(
            [str(SCRIPTS / "up"), str(folder), port], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert up.returncode == 0, up.stderr
        yield dict(line.split("=") for line in up.stdout.split())
    finally:
        subprocess.run([str(SCRIPTS / "down"), str(folder)], check=True, timeout=60)


@dataclass(frozen=True)
class Site:
    """The folder, the variables that select the cluster, and the folder of the launcher's package."""

    folder: Path
    cluster: dict[str, str]
    packages: Path

    def write(self, name: str, ranks: int = 2, **sections: Any) -> None:
        """Write a run whose ranks train nothing."""
        Bench.make(self.folder).write(ranks, name=name, **sections)

    def ortflow(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        # The MPI that is installed with this Python serves the ranks' one, too.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PYTHONPATH": str(self.packages), "PATH": path}
        return command(*arguments, folder=self.folder, **{**self.cluster, **own, **variables})

    def submit(self, *arguments: str, **variables: str) -> str:
        """Submit the run file; returns the job's id."""
        done = self.ortflow("submit", "run.yaml", "-b", "gridengine", *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("gridengine://")[1].split()[0]

    def ask(self, *words: str, check: bool = True) -> str:
        """The output of one of Grid Engine's commands."""
        done = subprocess.run(
            words,
            env=environment(**self.cluster),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stdout} {done.stderr}"
        return done.stdout

    def status(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.ortflow("status", name, "--json").stdout))

    def wait(self, name: str, state: str, step: int = 0) -> dict[str, Any]:
        """The run's status once it is in this state, and has come to this step."""
        found: dict[str, Any] = {}

        def there() -> bool:
            found.update(self.status(name))
            return found["state"] == state and found["step"] >= step

        self.until(there, lambda: f"{found}\n{self.log(name)}")
        return found

    def until(self, there: Callable[[], bool], why: Callable[[], object] = str) -> None:
        end = time.monotonic() + PATIENCE
        while not there():
            assert time.monotonic() < end, why()
            time.sleep(0.3)

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)

    def log(self, name: str) -> str:
        """What the run's jobs have printed."""
        logs = sorted((self.folder / "runs" / name / "logs").glob("gridengine-*.log"))
        return "\n".join(log.read_text() for log in logs)

    def ends(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.run(name).read_attempts() if record["event"] in ("end", "stop")]
