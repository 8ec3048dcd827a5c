"""Sequence parallelism beside horizontal division alone: the memory of a rank, and the time of a step.

    python benchmarks/sequence.py [--run-file FILE] [--ranks 2 --steps 12 --rounds 1] [KEY=VALUE ...]

Trains the run file's model (by default examples/gpt) through `ortflow run` with `parallel.horizontal` and with
`parallel.sequence_parallel` as well; both take turns. Prints the losses' largest difference too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from zero import EXAMPLE, WARM_UP, events


@dataclass(frozen=True)
class Measured:
    """Of one run."""

    seconds: list[float]
    losses: list[float]
    values: int
    """Highest bytes of graphs, libraries and data on rank 1: rank 0 also builds the graphs."""


def train(arguments: argparse.Namespace, runs: Path, shared: bool) -> Measured:
    """A run with or without sequence parallelism."""
    folder = runs / f"shared-{shared}"
    done = subprocess.run(
        [sys.executable, "-m", "ortflow", "run", str(arguments.run_file), "--fresh", f"run_dir={folder}",
         f"resources.ranks_per_node={arguments.ranks}", f"parallel.horizontal={arguments.ranks}",
         f"parallel.sequence_parallel={str(shared).lower()}", f"train.steps={arguments.steps}",
         "train.schedule.warmup_steps=0", "data.eval_samples=16", "export.enabled=false",
         "train.check_gradient=false", *arguments.changes],
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the run ended with exit code {done.returncode}")
    (memory,) = events(folder, 1, "memory")
    steps = events(folder, 0, "step")
    return Measured([e["seconds"] for e in steps][WARM_UP:], [e["loss"] for e in steps], memory["values"])


def main() -> None:
    """Run both in turns; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-file", type=Path, default=EXAMPLE)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="further values for both")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    found: dict[bool, list[Measured]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for shared, measured in found.items():
                measured.append(train(arguments, Path(folder), shared))
    seconds = {shared: statistics.median(s for each in runs for s in each.seconds) for shared, runs in found.items()}
    for shared, runs in found.items():
        print(
            f"sequence_parallel {shared}: {seconds[shared] * 1e3:.1f} ms a step, "
            f"{min(each.values for each in runs) / 1e6:.1f} MB of values"
        )
    whole, parts = (min(each.values for each in found[shared]) for shared in (False, True))
    furthest = max(abs(a - b) / b for a, b in zip(found[True][0].losses, found[False][0].losses, strict=True))
    print(
        f"sequence parallelism on {arguments.ranks} ranks: {parts / whole:.2f} of the values, "
        f"{seconds[True] / seconds[False]:.2f} of the time, losses differ by {furthest:.1e} at most"
    )


if __name__ == "__main__":
    main()
