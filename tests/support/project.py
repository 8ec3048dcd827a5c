"""A small real run for tests: a tiny GPT with dropout on real text, made with the project's own tools.

Used by the integration and the chaos tests. Everything goes through the command line, as for a user.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from forks import run_command
from waits import PATIENCE

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "gpt"
ORTFLOW = [sys.executable, "-m", "ortflow"]
FEW_CORES = {
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    **{f"MPIR_CVAR_{call}_POSIX_INTRA_ALGORITHM": "mpir" for call in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")},
    "OPENBLAS_NUM_THREADS": "1",
}
"""Settings with which what waits yields the core. Ranks of MPICH in collective calls within a node do not by default:
a run of four ranks on two cores then takes five times as long, and three times the processor time (MPICH 5.0). Nor do
threads of numpy's OpenBLAS for 30 ms behind each product, and starting them takes 17 ms of each process. Sums add in
another order: not for tests that compare bits with a run without these settings."""
MPICH_SUMS = {name: "auto" for name in FEW_CORES if name.endswith("ALGORITHM")}
"""MPICH's own choice of sums, as in users' runs, where a test's environment has `FEW_CORES`."""


def environment(**changes: str) -> dict[str, str]:
    """The environment of a test's commands, without pytest's warnings filter and without a run's variables."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("ORTFLOW_", "PMI", "OMPI_", "SLURM_"))
    }
    return {**kept, "PYTHONWARNINGS": "default", **changes}


def command(
    *arguments: str, folder: Path, timeout: float = 2 * PATIENCE, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run `ortflow ARGUMENTS` in a folder: in a fork, unless another interpreter would start differently there."""
    return run_command(*arguments, folder=folder, environment=environment(**changes), timeout=timeout)


@functools.cache
def _template(dropout: float, layers: int, width: int, heads: int, length: int) -> Path:
    """A folder with the model and its data, made once in a process of tests."""
    parent = Path(tempfile.mkdtemp(prefix="ortflow-project-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / "project"  # copied with its mode: mkdtemp's keeps other users out
    folder.mkdir()
    numbers = {"layers": layers, "width": width, "heads": heads, "context": length, "dropout": dropout}
    sizes = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    subprocess.run(
        [sys.executable, str(EXAMPLE / "model.py"), "--output", str(folder / "model.onnx"), *sizes],
        check=True, capture_output=True,
    )  # fmt: skip
    text = folder / "text"
    text.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("abc.py", "bisect.py"):
        shutil.copy(library / name, text / name)
    # The held-out file: about 64 windows. All of it had 271, in each evaluation, and a run trains on 240.
    (text / "copy.py").write_bytes((library / "copy.py").read_bytes()[: 64 * length])
    done = command(
        "data", "convert", "text/*.py", "--text", "--length", str(length), "--eval-fraction", "0.1",
        "--output", "set", folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@dataclass(frozen=True)
class Project:
    """A folder with a model, data and a run file."""

    folder: Path

    @classmethod
    def make(
        cls, folder: Path, *, dropout: float = 0.1, layers: int = 2, width: int = 32, heads: int = 2, length: int = 32
    ) -> Project:
        """A GPT, by default of 2 layers and width 32, on a few hundred windows of the standard library's source."""
        folder.mkdir(parents=True, exist_ok=True)
        template = _template(dropout, layers, width, heads, length)
        shutil.copytree(template, folder, dirs_exist_ok=True)
        return cls(folder)

    def write(self, name: str, **changes: Any) -> Path:
        """A run file; `changes` are values by key path, with `__` for the dot."""
        columns = {"tokens": "tokens[:-1]", "labels": "tokens[1:]"}
        run: dict[str, Any] = {
            "name": name,
            "seed": 3,
            "model": {"path": "model.onnx", "loss": "cross_entropy", "metrics": ["accuracy"]},
            "data": {
                "train": {"path": "set/train.arrow", "columns": dict(columns)},
                "eval": {"path": "set/eval.arrow", "columns": dict(columns)},
                "micro_batch": 4,
            },
            "train": {
                "steps": 30,
                "optimizer": {"name": "adamw", "lr": 5e-3, "weight_decay": 0.1},
                "schedule": {"name": "cosine", "warmup_steps": 5},
                "clip_norm": 1.0,
                "evaluation": {"every_steps": 10},
            },
            "checkpoint": {"every_steps": 5},
            "resources": {"ranks_per_node": 2},
            "restart": {"failures": 1000, "backoff": {"first": 0.0, "limit": 0.0}},
        }
        for path, value in changes.items():
            *parents, key = path.split("__")
            section = run
            for parent in parents:
                section = section.setdefault(parent, {})
            section[key] = value
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run, sort_keys=False))
        return file

    def run_dir(self, name: str) -> Path:
        """The run directory."""
        return self.folder / "runs" / name

    def run(self, name: str, *arguments: str, **changes: Any) -> Path:
        """Run to the end; the run directory."""
        file = self.write(name, **changes)
        done = command("run", file.name, *arguments, folder=self.folder)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(self.run_dir(name))}"
        return self.run_dir(name)


def events(run_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The events of a rank."""
    path = run_dir / "events" / f"rank-{rank:04d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def of_kind(run_dir: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    """Events of one kind."""
    return [record for record in events(run_dir, rank) if record["event"] == kind]


def curve(run_dir: Path, rank: int = 0) -> list[tuple[int, float, float, float]]:
    """Step, loss, gradient norm and learning rate, in the order of the record."""
    return [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in of_kind(run_dir, "step", rank)]


def evaluations(run_dir: Path) -> list[tuple[int, float, float]]:
    """Step, loss and accuracy of each evaluation."""
    return [(r["step"], r["loss"], r["accuracy"]) for r in of_kind(run_dir, "evaluation")]


def logs(run_dir: Path) -> str:
    """All logs, for the message of a failing test."""
    parts = [f"--- {path}\n{path.read_text(errors='replace')[-3000:]}" for path in sorted(run_dir.rglob("*.log"))]
    return "\n".join(parts)


def leftovers(run_dir: Path) -> list[str]:
    """Files that a finished run must not leave: temporary files, lock contents, stop requests."""
    return sorted(
        str(path.relative_to(run_dir))
        for path in run_dir.rglob("*")
        if path.name.startswith((".tmp", ".trash", ".stop")) or path.suffix in {".tmp", ".partial"}
    )
