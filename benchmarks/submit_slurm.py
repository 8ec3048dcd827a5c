"""What `ortflow submit -b slurm` costs over `sbatch` of what `ortflow render` has written before; and `ortflow list`.

    SLURM_CONF=… python benchmarks/submit_slurm.py      # on any cluster, of tests/testbeds/slurm too; it trains nothing

Prints seconds of whole commands, medians of rounds in which the two take turns, and what Python itself needs to start.
The jobs are held back (`begin`) and taken out of the queue again. Beside what sbatch does, submit reads and checks the
run file, looks for a job of the run, makes its directory and puts all on record. The target is under 0.25 s.
`ortflow list` of 200 runs that wait takes turns with `squeue` of their jobs; its target is under 1 s.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import yaml
from commands import ORTFLOW, run

TARGET = 0.25
"""Seconds that submit may take over sbatch."""
LISTED = 200
LIST_TARGET = 1.0
"""Seconds that `ortflow list` of so many runs may take."""
RUN = {
    "model": {"path": "model.onnx", "loss": "cross_entropy"},
    "data": {"train": "train.arrow", "micro_batch": 4},
    "train": {"steps": 100, "optimizer": {"name": "adamw", "lr": 1e-3}},
    "resources": {"nodes": 2, "ranks_per_node": 2},
    "backends": {"slurm": {"begin": "now+1hour"}},
}


def rounds(file: Path, count: int) -> dict[str, list[float]]:
    """Seconds of each way; a run of its own each time."""
    found: dict[str, list[float]] = {"python": [], "sbatch": [], "ortflow submit": []}
    jobs = []
    for number in range(count):
        name = f"bench-{number}-{os.getpid()}"
        ready = file.with_suffix(".sh")
        ready.write_text(run(*ORTFLOW, "render", "-b", "slurm", str(file), f"name={name}")[0])
        # Where nothing is compiled yet, the first round compiles it; it does not count.
        measured = {
            "python": run(sys.executable, "-c", "pass"),
            "sbatch": run("sbatch", "--parsable", "--output=/dev/null", str(ready)),
            "ortflow submit": run(
                *ORTFLOW, "submit", "-b", "slurm", str(file), f"name={name}", "--runs-dir", str(file.parent / "runs")
            ),
        }
        jobs += [measured["sbatch"][0].strip(), measured["ortflow submit"][0].split("//")[1].split()[0]]
        if number:
            for way, (_, ended) in measured.items():
                found[way].append(ended)
    run("scancel", *jobs)
    return found


def lists(file: Path, count: int) -> dict[str, list[float]]:
    """Seconds of each way to see many runs at once: copies of one that waits, as its directory is all that counts."""
    found: dict[str, list[float]] = {"squeue": [], "ortflow list": []}
    runs = file.parent / "listed"
    name = f"bench-list-{os.getpid()}"
    reported = run(*ORTFLOW, "submit", "-b", "slurm", str(file), f"name={name}", "--runs-dir", str(runs))[0]
    job = reported.split("//")[1].split()[0]
    for number in range(LISTED - 1):
        shutil.copytree(runs / name, runs / f"{name}-{number}")
    for number in range(count):
        measured = {
            "squeue": run("squeue", "-h", "-j", job)[1],
            "ortflow list": run(*ORTFLOW, "list", "--json", "--runs-dir", str(runs))[1],
        }
        if number:
            for way, seconds in measured.items():
                found[way].append(seconds)
    run("scancel", job)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="where runs may lie; a temporary folder if not given")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=wanted.folder) as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump({"name": "bench", **RUN}))
        for name in ("model.onnx", "train.arrow"):
            (file.parent / name).write_bytes(b"")
        found = rounds(file, wanted.rounds + 1)
        listed = lists(file, wanted.rounds + 1)
    medians = {way: statistics.median(seconds) for way, seconds in found.items()}
    for way, seconds in medians.items():
        print(f"{way:15} {seconds:6.3f} s")
    over = medians["ortflow submit"] - medians["sbatch"]
    print(f"{'over sbatch':15} {over:6.3f} s, {over / medians['python']:.1f} times python itself (target: {TARGET} s)")
    medians = {way: statistics.median(seconds) for way, seconds in listed.items()}
    for way, seconds in medians.items():
        print(f"{way:15} {seconds:6.3f} s")
    ratio = medians["ortflow list"] / medians["squeue"]
    print(f"{LISTED} runs at once: {ratio:.1f} times squeue (target: {LIST_TARGET} s)")


if __name__ == "__main__":
    main()
