"""Draws docs/pictures/two-kills.svg: the loss of a run that is killed twice, on that of a calm one.

    python docs/pictures/two_kills.py [--kill STEP --kill STEP] [-o FILE] [RUN_FILE KEY=VALUE …]

Starts the run twice in a temporary folder, and sends SIGKILL to a rank of the second one after each of the steps. Fails
if the curves are not equal bit by bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ortflow.launchers.report.curves import step_curves
from ortflow.launchers.report.svg import line_chart
from ortflow.launchers.supervision.processes import family, ranks_among
from ortflow.workflow.run.record import EVENTS, read_records
from ortflow.workflow.run.rundir import RunDir

ROOT = Path(__file__).parents[2]
RUN = ["train.epochs=3", "checkpoint.every_steps=20", "export.enabled=false"]
STYLE = """<style>
text{font:11px system-ui,sans-serif;fill:#57606a}.grid{stroke:#d0d7de;fill:none}
.mark{stroke:#cf222e;stroke-dasharray:3 3}
polyline{fill:none;stroke-linejoin:round}.s0{stroke:#9ecbff;stroke-width:5}.s1{stroke:#bc4c00;stroke-width:1.4}
@media(prefers-color-scheme:dark){text{fill:#9198a1}.grid{stroke:#30363d}.s0{stroke:#1f4b80}.s1{stroke:#f0883e}}
</style>"""


def main() -> None:
    """Run, compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", type=int, action="append", help="steps after which a rank is killed")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_name("two-kills.svg"))
    parser.add_argument("run_file", type=Path, nargs="?", default=ROOT / "examples" / "digits" / "run.yaml")
    parser.add_argument("overrides", nargs="*", default=RUN)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        shutil.copytree(arguments.run_file.parent, project, ignore=shutil.ignore_patterns("runs", "build"))
        file = project / arguments.run_file.name
        calm = trained(file, "calm", arguments.overrides, [])
        killed = trained(file, "killed", arguments.overrides, arguments.kill or [50, 95])
    curves = {"calm": losses(calm), "killed twice": losses(killed)}
    if curves["calm"] != curves["killed twice"]:
        raise SystemExit("the curves differ")
    marks = [float(event["step"]) for event in killed if event["event"] == "resume"]
    title = "The loss of a run that was killed twice lies on that of a calm run"
    picture = line_chart(title, curves, identifier="two-kills", marks=marks)
    start = picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = start.partition(">")
    arguments.output.write_text(f"{head}>{STYLE}{rest}\n")
    resumed = ", ".join(f"{mark:g}" for mark in marks)
    print(f"{arguments.output}: {len(curves['calm'])} steps, resumed at steps {resumed}")


def trained(file: Path, name: str, overrides: list[str], kills: list[int]) -> list[dict[str, object]]:
    """Run to the end, and kill rank 1 after each of the steps; the events of rank 0."""
    run = RunDir(file.parent / "runs" / name)
    command = [sys.executable, "-m", "ortflow", "run", str(file), f"name={name}", "restart.backoff.first=0", *overrides]
    with subprocess.Popen(command, cwd=file.parent, env={**os.environ, "COLUMNS": "120"}) as launcher:
        for step in kills:
            while launcher.poll() is None and newest(run) < step:
                time.sleep(0.02)
            ranks = ranks_among(family(psutil.Process(launcher.pid)))
            ranks[1].kill()
            ranks[1].wait()
        if launcher.wait():
            raise SystemExit(f"the run {name} failed")
    return read_records(run.events(0), EVENTS)[0]


def newest(run: RunDir) -> int:
    """The newest step."""
    events, _ = read_records(run.events(0), EVENTS)
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


def losses(events: list[dict[str, object]]) -> list[tuple[float, float]]:
    """The loss of each step."""
    return step_curves(events)["loss"]


if __name__ == "__main__":
    main()
