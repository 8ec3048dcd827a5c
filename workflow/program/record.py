"""What a run of a program records about its code: git commit and changes, packages, the hash of the script.

Written by rank 0 into RUN_DIR/program/. Checkpoints have a short form of it as their environment.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

import xxhash

from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.spec.program import ProgramSection
from ortflow.workflow.system.runtimes import installed_version

FRAMEWORKS = ("torch", "jax", "tensorflow", "numpy", "transformers", "lightning", "accelerate", "deepspeed", "horovod")
GIT_SECONDS = 5.0
LONGEST_DIFF = 4 << 20
"""Bytes of changes that are recorded: a longer diff has data in it."""


@dataclass(frozen=True)
class Record:
    """The code of a run, as rank 0 sees it when an attempt begins."""

    command: tuple[str, ...]
    script: str | None
    hash: str
    """Hash of the script's bytes; empty without a script."""
    commit: str
    """git's commit of the program's folder; empty if it is not in a repository."""
    changed: bool
    """Whether the folder differs from the commit."""
    python: str
    platform: str
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of the packages of `FRAMEWORKS` that are installed."""

    @property
    def environment(self) -> dict[str, str]:
        """For the manifests of checkpoints."""
        values = {
            "python": self.python, "platform": self.platform, "script": self.hash, "commit": self.commit,
            "changed": str(self.changed).lower(),
        }  # fmt: skip
        values.update(self.packages)
        return {name: value for name, value in values.items() if value}


def take_record(program: ProgramSection, command: list[str], folder: Path) -> tuple[Record, bytes]:
    """The record, and the changes of the working tree against the commit."""
    script = None if program.script is None else Path(program.script)
    commit = _git(folder, "rev-parse", "HEAD").decode(errors="replace").strip()
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") if commit else b""
    record = Record(
        tuple(command),
        None if script is None else str(script),
        "" if script is None else xxhash.xxh3_128_hexdigest(script.read_bytes()),
        commit,
        bool(diff),
        platform.python_version(),
        f"{sys.platform} {platform.machine()}",
        {name: version for name in FRAMEWORKS if (version := installed_version(name)) is not None},
    )
    return record, diff


def save_packages(run_dir: RunDir) -> None:
    """Write RUN_DIR/program/packages.txt: all that is installed. Takes tenths of a second, so not before the start."""
    lines = sorted(
        f"{distribution.name}=={distribution.version}" for distribution in metadata.distributions() if distribution.name
    )
    write_atomically(run_dir.root / "program" / "packages.txt", ("\n".join(lines) + "\n").encode())


def save_record(run_dir: RunDir, record: Record, diff: bytes) -> None:
    """Write RUN_DIR/program/record.json and changes.diff."""
    folder = run_dir.root / "program"
    write_atomically(folder / "record.json", (json.dumps(asdict(record), indent=2) + "\n").encode())
    if len(diff) > LONGEST_DIFF:
        diff = diff[:LONGEST_DIFF] + b"\n[cut here: the changes are longer]\n"
    if diff or (folder / "changes.diff").exists():
        write_atomically(folder / "changes.diff", diff)


def _git(folder: Path, *arguments: str) -> bytes:
    """git's output; empty if there is no git, no repository, or no answer in time."""
    if shutil.which("git") is None:
        return b""
    # A repository's own settings could name a program that git would start.
    safe = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
    try:
        done = subprocess.run(
            ["git", *safe, *arguments], cwd=folder, capture_output=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return b""
    return done.stdout if done.returncode == 0 else b""
