"""`ortflow demo`: a run that is killed and resumes, beside one that nobody touches, from nothing to the exported model.

Registered in `ortflow.cli.app`. Must not import heavy packages at module level: `--help` loads this module. Everything
goes through the commands that a user types, and the folder is the user's to keep.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ortflow.workflow.errors import EXIT_FAILURE, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.streams import plain, terminal_output

FILES = ("run.yaml", "prepare.py")
KILL_BEHIND = 0.45
"""Share of the steps after which a rank is killed."""
SAME = ("loss", "lr", "grad_norm")
"""Fields of a step that must be equal in both runs, bit for bit."""


def demo(
    folder: Annotated[Path, typer.Argument(help="New folder for the run file, the data and the runs.")] = Path(
        "ortflow-demo"
    ),
) -> None:
    """Train a small model, kill it, and compare it with a run that was not killed: one minute, offline."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("is there already", where=str(folder), fix="give a new folder: ortflow demo FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(Path(__file__).parent.parent / "demo" / name, folder / name)
    _say(f"{folder}/run.yaml and prepare.py are the whole project. A run that nobody touches:")
    _finish(_ortflow(folder, "run", "run.yaml", "name=calm"))
    _say("The same run again. This time a rank is killed (kill -9) in the middle:")
    killed = _ortflow(folder, "run", "run.yaml")
    _kill_a_rank(folder / "runs/spirals", killed)
    _finish(killed)
    _say("What each run has recorded:")
    _finish(_ortflow(folder, "list"))
    calm, other = (_steps(folder / "runs" / name) for name in ("calm", "spirals"))
    different = [step for step in sorted(calm.keys() | other.keys()) if calm.get(step) != other.get(step)]
    if different:
        _say(f"The curves of the two runs differ from step {different[0]} on.")
        raise typer.Exit(EXIT_FAILURE)
    _say(f"Loss, learning rate and gradient norm of all {len(calm)} steps are the same bits in both runs.")
    _finish(_ortflow(folder, "report", "spirals", "--compare", "calm", "--output", "report.html"))
    _say(
        f"The trained model is {folder}/runs/spirals/export/model.onnx, the report {folder}/report.html. Next:\n"
        f"  cd {shlex.quote(str(folder))}\n"
        "  ortflow status spirals                     # the state of a run\n"
        "  ortflow resume spirals train.epochs=40     # make it longer\n"
        "  ortflow render --backend slurm run.yaml    # the same run as a batch script"
    )


def _say(text: str) -> None:
    _print(f"\n{text}", bold=True)


def _print(text: str, **style: bool) -> None:
    """Print in a style, which standard output would escape."""
    stream = terminal_output()
    typer.secho(plain(text), file=stream, **style)
    if stream is not None:
        stream.flush()


def _ortflow(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a command as a user does, in the demo's folder."""
    _print(f"$ ortflow {shlex.join(arguments)}", dim=True)
    sys.stdout.flush()
    return subprocess.Popen([sys.executable, "-m", "ortflow", *arguments], cwd=folder, stdin=subprocess.DEVNULL)


def _finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command; end as it ended if it failed. Ctrl-C reaches it, too: a second wait lets it save."""
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise typer.Exit(EXIT_FAILURE) from None
    if code:
        raise typer.Exit(code if code > 0 else EXIT_FAILURE)


def _kill_a_rank(run_dir: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Kill rank 1 when it has done its share of the steps, or do nothing if the run ends before."""
    pid = None
    while launcher.poll() is None:
        events = _events(run_dir, 1)
        pid = next((event["pid"] for event in events if event["event"] == "attempt_start"), pid)
        done = max((event["step"] for event in events if event["event"] == "step"), default=0)
        with suppress(OSError, ValueError, KeyError):
            total = json.loads(RunDir(run_dir).plan.read_text())["total_steps"]
            if pid is not None and done >= KILL_BEHIND * total:
                os.kill(pid, signal.SIGKILL)
                return
        time.sleep(0.05)


def _steps(run_dir: Path) -> Mapping[int, list[Any]]:
    """Step -> the fields of `SAME`."""
    return {event["step"]: [event[key] for key in SAME] for event in _events(run_dir, 0) if event["event"] == "step"}


def _events(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's events; empty if there are none yet."""
    from ortflow.workflow.run.record import EVENTS, read_records

    return read_records(RunDir(run_dir).events(rank), EVENTS)[0]
