"""Runs of a few dozen parameters that take a second, for tests of hundreds of trials.

Everything goes through the command line, as for a user; `limited` also measures a command's time and memory.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from data_sets import write_batches
from forks import Ended, run_command
from project import ORTFLOW, curve, environment
from small_network import save_model
from waits import PATIENCE

STEPS = 12
RUN: dict[str, Any] = {
    "name": "tiny",
    "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy", "label": "labels"}},
    "data": {"train": "set.arrow", "micro_batch": 4},
    "train": {"steps": STEPS, "optimizer": {"name": "adamw", "lr": 1e-2}},
    "checkpoint": {"every_steps": 3},
    "monitor": {"every_steps": 1},
    "resources": {"ranks_per_node": 1, "cpus_per_rank": 1},
    "restart": {"failures": 3, "backoff": {"first": 0.0, "limit": 0.0}},
}


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float
    peak: int
    """Bytes of memory at most, of the command or a child it waited for."""

    @property
    def said(self) -> str:
        return self.out + self.err


@dataclass(frozen=True)
class Tiny:
    """A folder with a model, a set of 64 samples and a run file."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, **sections: Any) -> Tiny:
        folder.mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(1)
        save_model(folder / "model.onnx")
        samples = {"x": random.normal(size=(64, 5)).astype(np.float32), "labels": random.integers(0, 3, 64)}
        write_batches(folder / "set.arrow", samples)
        (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, **sections}))
        return cls(folder)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "tiny"

    def start(self, *arguments: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*ORTFLOW, *arguments], cwd=self.folder, env=environment(**changes), text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def command(self, *arguments: str, timeout: float = PATIENCE, **changes: str) -> Done:
        """Run a command, and measure it."""
        begun, variables = time.monotonic(), environment(**changes)
        done = run_command(*arguments, folder=self.folder, environment=variables, timeout=timeout)
        peak = done.peak if isinstance(done, Ended) else resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - begun, peak)

    def half(self, template: Path) -> None:
        """Copy the half-done run of another folder here."""
        shutil.rmtree(self.run_dir, ignore_errors=True)
        shutil.copytree(template, self.run_dir, symlinks=True)


def result(run_dir: Path) -> tuple[list[Any], bytes]:
    """What must be bit-identical: the curve, and the exported model."""
    return curve(run_dir), (run_dir / "export" / "model.onnx").read_bytes()


def has_traceback(text: str) -> bool:
    """Whether the output has an unexpected traceback."""
    return "Traceback (most recent call last)" in text


def is_root() -> bool:
    return os.geteuid() == 0
