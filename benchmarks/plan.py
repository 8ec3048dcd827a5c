"""`ortflow plan` against runs: time of a step and memory of every layout that it lists.

    python benchmarks/plan.py [--run-file FILE] [--ranks 2 --memory 400MB --steps 10 --rounds 1 --no-measure]
                              [KEY=VALUE ...]

Asks `ortflow plan` for the layouts of a run file (by default examples/gpt, with more samples a step), then trains each
for a few steps through `ortflow run`. Rounds go through all layouts one after the other. Seconds are those of the
fastest step, because other work on the machine only lengthens steps; memory is the largest of the ranks' events. Prints
predicted over measured for each layout, and Spearman's rank correlation of the times: 1 if the order is right, 0 if it
says nothing. Ranks need a core each: on fewer, the measured times are those of ranks that wait for each other's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt" / "run.yaml"
WARM_UP = 3
ORTFLOW = [sys.executable, "-m", "ortflow"]


def planned(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `ortflow plan` finds."""
    measure = [] if arguments.measure is None else ["--measure" if arguments.measure else "--no-measure"]
    memory = [] if arguments.memory is None else ["--memory", arguments.memory]
    words = [str(arguments.run_file), *arguments.changes, "--ranks", str(arguments.ranks), *memory, *measure, "--json"]
    done = subprocess.run([*ORTFLOW, "plan", *words], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def events(folder: Path, kind: str) -> list[list[dict[str, Any]]]:
    """Events of a kind, by rank."""
    files = sorted((folder / "events").glob("rank-*.jsonl"))
    return [[e for e in map(json.loads, file.read_text().splitlines()) if e["event"] == kind] for file in files]


def train(arguments: argparse.Namespace, folder: Path, layout: dict[str, Any]) -> tuple[list[float], int]:
    """Seconds of the steps of a run under a layout, and the most memory that a rank used."""
    keys = [
        f"{name}.{key}={json.dumps(value)}"
        for name, section in layout["keys"].items()
        for key, value in section.items()
    ]
    done = subprocess.run(
        [*ORTFLOW, "run", str(arguments.run_file), *arguments.changes, "--fresh", f"run_dir={folder}",
         f"train.steps={arguments.steps}",
         "train.schedule.warmup_steps=0", "data.eval=null", "train.evaluation=null", "train.check_gradient=false",
         "export.enabled=false", *keys],
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the run under {layout['parallel']} ended with exit code {done.returncode}")
    seconds = [event["seconds"] for event in events(folder, "step")[0]][WARM_UP:]
    return seconds, max(event["peak"] for rank in events(folder, "memory") for event in rank)


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]

    return statistics.correlation(ranks(one), ranks(other))


def main() -> None:
    """Plan, run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-file", type=Path, default=EXAMPLE)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="further values of the run file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--memory", help="of a rank, as for `ortflow plan`: layouts that fit only with recomputation")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--measure", action=argparse.BooleanOptionalAction)
    arguments = parser.parse_args()
    if not arguments.run_file.exists():
        parser.error(f"{arguments.run_file} does not exist")
    if arguments.run_file == EXAMPLE and not arguments.changes:
        arguments.changes = ["train.global_batch=64", "resources.cpus_per_rank=1"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"{arguments.ranks} ranks on {cores} cores, load {os.getloadavg()[0]:.1f} before the start")
    plan = planned(arguments)
    runs: list[list[float]] = [[] for _ in plan["layouts"]]
    peaks = [0 for _ in plan["layouts"]]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for number, layout in enumerate(plan["layouts"]):
                seconds, peak = train(arguments, Path(folder) / f"layout-{number}", layout)
                runs[number] += seconds
                peaks[number] = max(peaks[number], peak)
    measured = [min(each) for each in runs]
    print(
        f"{'ms: predicted':>13} {'measured':>9} {'ratio':>6}   {'MB: predicted':>13} {'measured':>9} {'ratio':>6}"
        "  layout"
    )
    for layout, seconds, peak in zip(plan["layouts"], measured, peaks, strict=True):
        times = f"{1e3 * layout['seconds']:13.1f} {1e3 * seconds:9.1f} {layout['seconds'] / seconds:6.2f}"
        memory = f"{layout['memory'] / 1e6:13.0f} {peak / 1e6:9.0f} {layout['memory'] / peak:6.2f}"
        recompute = f" recompute {layout['recompute']}" if layout["recompute"] else ""
        print(f"{times}   {memory}  {json.dumps(layout['parallel'])}{recompute}")
    for line in plan["prediction"]:
        print(line)
    if len(measured) > 1:
        rho = correlation([layout["seconds"] for layout in plan["layouts"]], measured)
        print(
            f"rank correlation of the times: {rho:.2f}; "
            f"the first took {measured[0] / min(measured):.2f} of the fastest's"
        )


if __name__ == "__main__":
    main()
