"""Which rank is named when one of several is killed: the one whose log was closed first, and the one that Hydra names.

    python benchmarks/killed_ranks.py --kills 40 --busy 3

Linux, MPICH. Starts ranks under mpirun, beside processes that keep the cores busy, kills one with SIGKILL, and compares
both answers with it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ortflow.launchers.supervision.exits import Exits

RANK = """
import os, sys, threading
from pathlib import Path
import numpy as np
from ortflow.workflow.rank import redirect_output
folder, rank = Path(sys.argv[1]), int(os.environ["PMI_RANK"])
redirect_output(folder / f"rank-{rank:04d}.log")
from mpi4py import MPI
held, some = np.ones(int(sys.argv[2]) << 17), np.ones(1000)
MPI.COMM_WORLD.Barrier()
ready = folder / f"{rank}.written"
ready.write_text(str(os.getpid()))
ready.rename(folder / f"{rank}.ready")
while True:
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, some)
"""
BUSY = "while True: pass"
HYDRA = re.compile(r"PID (\d+) RUNNING AT")


def kill(ranks: int, size: int) -> tuple[bool, bool]:
    """Whether the log and Hydra name the rank that was killed."""
    with tempfile.TemporaryDirectory() as folder:
        exits = Exits(Path(folder))
        mpirun = Path(sys.executable).parent / "mpirun"
        command = [mpirun, "-n", str(ranks), sys.executable, "-c", RANK, folder, str(size)]
        yields = {**os.environ, "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=yields) as run:
            ready = [Path(folder, f"{rank}.ready") for rank in range(ranks)]
            while not all(each.exists() for each in ready):
                if run.poll() is not None:
                    raise SystemExit(f"the ranks ended\n{run.communicate()[0]}")
                time.sleep(0.05)
            pids = [int(each.read_text()) for each in ready]
            time.sleep(random.uniform(0.0, 0.3))
            killed = random.randrange(ranks)
            os.kill(pids[killed], 9)
            named = HYDRA.findall(run.communicate()[0])
        order = exits.order()
        exits.close()
    return order[:1] == [killed], named[:1] == [str(pids[killed])]


def main() -> None:
    """Print how often each was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, what in (
        ("kills", 40, "ranks to kill"), ("ranks", 4, "ranks of a run"), ("size", 100, "MB that a rank holds"),
        ("busy", 3, "busy processes beside them"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default %(default)s)")
    options = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(options.busy)]
    try:
        found = [kill(options.ranks, options.size) for _ in range(options.kills)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for name, right in zip(("the log that was closed first", "Hydra"), map(sum, zip(*found, strict=True)), strict=True):
        print(f"{name}: {right} of {options.kills} right, {right / options.kills:.0%}")


if __name__ == "__main__":
    main()
