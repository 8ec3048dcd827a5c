"""Runs of small training programs through the command line, and what is left of them."""

from __future__ import annotations

import json
import subprocess
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from forks import run_merged
from project import ORTFLOW, environment
from waits import PATIENCE


@dataclass(frozen=True)
class Programs:
    """A folder with programs and their runs."""

    folder: Path

    def write(self, text: str, name: str = "train.py") -> Path:
        """A program of this text."""
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        """Start `ortflow ARGUMENTS`."""
        return subprocess.Popen(
            [*ORTFLOW, *arguments], cwd=self.folder, env=environment(**changes), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, *arguments: str, seconds: float = 2 * PATIENCE, **changes: str) -> tuple[int, str]:
        """Run `ortflow run ARGUMENTS`; returns the exit code and all that it printed."""
        done = run_merged(
            "run", *arguments, folder=self.folder, environment=environment(**changes), timeout=seconds
        )  # fmt: skip
        if done is not None:
            return done.returncode, done.stdout
        process = self.start("run", *arguments, **changes)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=PATIENCE)
            raise AssertionError(f"still running after {seconds} s:\n{output}") from None
        return process.returncode, output

    def log(self, rank: int = 0, name: str = "train", attempt: int = 0) -> str:
        """A rank's log."""
        return (self.folder / "runs" / name / "logs" / f"attempt-{attempt:02d}" / f"rank-{rank:04d}.log").read_text()

    def events(self, kind: str, rank: int = 0, name: str = "train") -> list[dict[str, Any]]:
        """A rank's events of a kind."""
        file = self.folder / "runs" / name / "events" / f"rank-{rank:04d}.jsonl"
        return [record for line in file.read_text().splitlines() if (record := json.loads(line))["event"] == kind]

    def left(self, name: str = "train") -> list[str]:
        """Processes of a run that still live a while after its end: on a busy machine a killed one dies late."""
        end = time.monotonic() + PATIENCE / 2
        while (living := self._living(name)) and time.monotonic() < end:
            time.sleep(0.1)
        return living

    def _living(self, name: str) -> list[str]:
        root, found = str(self.folder / "runs" / name), []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("ORTFLOW_RUN_DIR") == root
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except (psutil.Error, OSError):
                continue
        return found
