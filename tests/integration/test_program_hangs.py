"""A program of mpi4py, of which one rank never comes to the sum of the others: the cause names both."""

from __future__ import annotations

from pathlib import Path

from messages import mentions
from program_runs import Programs

PROGRAM = """
import time
from mpi4py import MPI
import ortflow.program

run = ortflow.program.context()
comm = MPI.COMM_WORLD

def reads_a_lost_file():
    while True:
        time.sleep(0.05)

def main():
    print("begins", comm.size, flush=True)
    if comm.rank == 1:
        reads_a_lost_file()
    comm.allreduce(1.0)

main()
"""


def test_the_call_of_mpi4py_and_the_missing_rank_are_named(tmp_path: Path) -> None:
    """The limit is longer than the period in which the memory of programs is recorded: that is no sign of life."""
    (tmp_path / "run.yaml").write_text(
        "name: train\nprogram: {script: train.py, cwd: .}\nresources: {ranks_per_node: 3, cpus_per_rank: 1}\n"
        "restart: {failures: 0, hung_seconds: 12}\n"
    )
    programs = Programs(tmp_path)
    programs.write(PROGRAM)
    code, said = programs.run("run.yaml")
    assert code == 1
    assert "begins 3" in programs.log(0)
    assert mentions(
        said, "the ranks hung: no heartbeat for 12 s",
        "ranks 0 and 2 wait for other ranks in allreduce (", "train.py, line 17: comm.allreduce(1.0))",
        "rank 1 is in reads_a_lost_file (", "train.py, line 11: time.sleep(0.05)",
    ), said  # fmt: skip
