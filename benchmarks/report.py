"""Seconds and size of the report of a large run: `python benchmarks/report.py [--steps 100000] [--ranks 64]`.

Writes the records that such a run leaves, 1.5 GB at the default sizes, into a temporary folder; runs nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from recorded_runs import write_run

from ortflow.cli.report import html


def main() -> None:
    """Print the load of the machine, the seconds and the size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "large", steps=arguments.steps, ranks=arguments.ranks, kills=3, slow_rank=5)
        size = sum(path.stat().st_size for path in (run.root / "events").iterdir())
        begun, cpu = time.monotonic(), time.process_time()
        page = html(run, [])
        seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    load = os.getloadavg()[0]
    print(f"records: {size / 1e6:.0f} MB of {arguments.ranks} ranks and {arguments.steps} steps; load {load:.1f}")
    print(f"report: {seconds:.2f} s ({cpu:.2f} s of the processor), {len(page.encode()) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
