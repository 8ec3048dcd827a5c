"""ZeRO's stage 3 over stage 0: the time of a step, and the memory of a rank.

    python benchmarks/zero.py [--run-file FILE] [--ranks 2 --steps 20 --rounds 2 --stage 3] [KEY=VALUE ...]

Trains the run file's model (by default examples/gpt) through `ortflow run` under both
stages, which take turns. The seconds of a step are those of the events, the first five left out. Memory is that of
rank 1, because rank 0 has all parameters for a moment, to check the gradient: the bytes of what ZeRO shards, and the
highest that the process has held. Prints medians and the ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt" / "run.yaml"
WARM_UP = 5
STATE = ("parameters", "gradients", "moments", "messages")


@dataclass(frozen=True)
class Measured:
    """Of one run."""

    seconds: list[float]
    state: int
    """Bytes of parameters, gradients, moments and messages."""
    peak: int


def events(folder: Path, rank: int, kind: str) -> list[dict[str, Any]]:
    """A rank's events of a kind."""
    lines = (folder / "events" / f"rank-{rank:04d}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def train(arguments: argparse.Namespace, runs: Path, stage: int) -> Measured:
    """A run under a stage."""
    folder = runs / f"stage-{stage}"
    done = subprocess.run(
        [sys.executable, "-m", "ortflow", "run", str(arguments.run_file), "--fresh", f"run_dir={folder}",
         f"resources.ranks_per_node={arguments.ranks}", f"train.steps={arguments.steps}", f"parallel.zero={stage}",
         "train.schedule.warmup_steps=0", "data.eval_samples=16", "export.enabled=false", *arguments.changes],
        check=False, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"the run under stage {stage} ended with exit code {done.returncode}")
    (memory,) = events(folder, min(1, arguments.ranks - 1), "memory")
    seconds = [event["seconds"] for event in events(folder, 0, "step")][WARM_UP:]
    return Measured(seconds, sum(memory.get(name, 0) for name in STATE), memory["peak"])


def main() -> None:
    """Run both stages in turns; print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-file", type=Path, default=EXAMPLE)
    parser.add_argument("changes", nargs="*", metavar="KEY=VALUE", help="further values for both")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    arguments = parser.parse_args()
    if not arguments.run_file.exists():
        parser.error(f"{arguments.run_file} does not exist")
    found: dict[int, list[Measured]] = {0: [], arguments.stage: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for stage, measured in found.items():
                measured.append(train(arguments, Path(folder), stage))
    medians = {stage: statistics.median(s for each in runs for s in each.seconds) for stage, runs in found.items()}
    for stage, runs in found.items():
        print(
            f"stage {stage}: {medians[stage] * 1e3:.1f} ms a step, {runs[0].state / 1e6:.1f} MB of state, "
            f"{max(each.peak for each in runs) / 1e6:.0f} MB at most"
        )
    plain, sharded = found[0], found[arguments.stage]
    time = medians[arguments.stage] / medians[0]
    print(
        f"stage {arguments.stage} over 0 on {arguments.ranks} ranks: {time:.2f} of the time, "
        f"{sharded[0].state / plain[0].state:.2f} of the state, "
        f"{max(each.peak for each in sharded) / max(each.peak for each in plain):.2f} of the highest memory"
    )


if __name__ == "__main__":
    main()
