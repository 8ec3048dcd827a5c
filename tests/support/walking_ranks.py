"""Ranks that take a run through layouts without ending in between: a program for tests.

mpirun -n RANKS python walking_ranks.py RUN_DIR WALK    # what WALK contains is in `Stop`

The steps of the engine, the checkpoints and the ranks are those of any run; only the processes stay. Ranks that a
layout does not need wait for the next one that does. Each rank prints `good`.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "faults"))
from compared_resumes import compare_resumes

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.engine import Engine
from ortflow.workflow.run.events import EventLog
from ortflow.workflow.run.rundir import RunDir, write_atomically
from ortflow.workflow.run.signals import StopFlag
from ortflow.workflow.spec.checks.nodes import on_nodes
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps import runtime
from ortflow.workflow.steps.context import Context
from ortflow.workflow.steps.order import STEPS

EXPORT = "export"
LIMIT = 600.0
"""Seconds that a rank waits for a layout that needs it."""


@dataclass(frozen=True)
class Stop:
    """A stay under a layout."""

    layout: str
    """Its name: the graphs of a layout are built once."""
    ranks: int
    nodes: int
    """Of those of the run file, those that are there."""
    file: str
    """The run file."""


def write_walk(path: Path, walk: list[Stop]) -> Path:
    """A file for this program."""
    path.write_text(json.dumps([asdict(stop) for stop in walk]))
    return path


def main() -> None:
    """The program of each rank."""
    run_dir, everyone = RunDir(Path(sys.argv[1])), MpiCommunicator()
    walk = [Stop(**content) for content in json.loads(Path(sys.argv[2]).read_text())]
    os.chdir(run_dir.root.parent.parent)  # paths in run files are relative to it
    compare_resumes()
    os.environ["OMP_NUM_THREADS"] = "1"
    begun = run_dir.root.parent / "begun"
    for number, stop in enumerate(walk):
        if everyone.rank == 0:
            fetch_graphs(run_dir, stop.layout)
            shutil.copy(stop.file, run_dir.run_file)
            write_atomically(begun, str(number).encode())
        if everyone.rank < stop.ranks:
            wait_for(begun, number)
            world = everyone.subset(range(stop.ranks)) if stop.ranks > 1 else SoloCommunicator()
            stay(run_dir, stop, number, world)
        if everyone.rank == 0:
            keep_graphs(run_dir, stop.layout)
    print("good", flush=True)
    everyone.close()


def stay(run_dir: RunDir, stop: Stop, number: int, world: Communicator) -> None:
    """Train under a layout as one attempt does, and save."""
    place = Place(world.rank, world.world_size, world.rank, world.world_size, "MPICH", socket.gethostname())
    spec = on_nodes(load_run_file(run_dir.run_file, others=False), stop.nodes)
    events = EventLog(run_dir.events(world.rank), world.rank, number)
    context = Context(run_dir, spec, place, number, StopFlag(), events)

    def connect(_: Place, run: TrainerRunSpec) -> Communicator:
        assert run.world_size == world.world_size
        return world

    runtime.connect = connect
    context.engine = Engine([step for step in STEPS if step.name != EXPORT], events)
    context.engine.run(context)
    world.barrier()
    events.close()
    del context
    gc.collect()  # sessions end before the ranks of the next layout meet


def wait_for(begun: Path, number: int) -> None:
    """Wait for rank 0 without a call to MPI, which would take a core."""
    end = time.monotonic() + LIMIT
    while not begun.exists() or int(begun.read_text()) < number:
        assert time.monotonic() < end, f"rank 0 has not begun stop {number}"
        time.sleep(0.005)


def fetch_graphs(run_dir: RunDir, layout: str) -> None:
    """Bring the graphs of a layout back; none if this is the first stay."""
    kept = run_dir.root.parent / f"graphs-{layout}"
    for path in (run_dir.graphs, run_dir.plan):
        if (kept / path.name).is_dir():
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(kept / path.name, path)
        elif (kept / path.name).exists():
            shutil.copy(kept / path.name, path)


def keep_graphs(run_dir: RunDir, layout: str) -> None:
    """Keep the graphs of a layout for its next stay."""
    kept = run_dir.root.parent / f"graphs-{layout}"
    if not kept.exists():
        kept.mkdir()
        shutil.copytree(run_dir.graphs, kept / run_dir.graphs.name)
        shutil.copy(run_dir.plan, kept)


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - the other ranks must not wait
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
