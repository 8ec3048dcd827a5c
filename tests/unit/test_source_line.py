"""Calls of compiled packages leave no frame: they are named by the program's line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortflow.launchers.attempts.source_line import LONGEST, SourceLine, mpi_call, source_line
from ortflow.launchers.attempts.stacks import Frame, stacks_of, waited_for, where
from ortflow.workflow.run.hang import PROGRAM_STACKS
from ortflow.workflow.run.rundir import RunDir


@pytest.mark.parametrize(
    ("text", "uses_mpi", "call"),
    [
        ("total = comm.allreduce(loss)", True, "allreduce"),
        ("MPI.COMM_WORLD.Barrier()", False, "Barrier"),
        ("self.world.Reduce_scatter_block(a, b)", False, "Reduce_scatter_block"),
        ("request.Wait()", True, "Wait"),
        ("request.wait()", False, None),
        ("torch.gather(x, 0, index)", False, None),
        ("data = socket.recv(10)", False, None),
        ("comm.Get_rank()", True, None),
        ("", True, None),
    ],
)
def test_calls_of_mpi4py(text: str, uses_mpi: bool, call: str | None) -> None:
    assert mpi_call(SourceLine(text, uses_mpi)) == call


def test_lines_of_files(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"from mpi4py import MPI\n  f(\x1b[2J)\n{'x' * 300}\n")
    assert source_line(str(path), 1) == SourceLine("from mpi4py import MPI", True)
    assert "\x1b" not in source_line(str(path), 2).text
    assert len(source_line(str(path), 3).text) == LONGEST
    assert source_line(str(path), 4) == source_line(str(tmp_path), 1) == source_line("<string>", 1) == SourceLine()


def test_the_lines_of_a_program_are_shown(tmp_path: Path) -> None:
    """JAX has frames of its own where it meets others by Python; a compiled call has the line alone."""
    program = tmp_path / "train.py"
    program.write_text('import jax\nsync_global_devices("save")\nloss = step(batch)\n')
    jax = "/env/lib/python3.11/site-packages/jax"
    stacks = {
        0: f'  File "{jax}/_src/interpreters/pxla.py", line 395 in __call__\n'
        f'  File "{jax}/_src/pjit.py", line 139 in _run_python_pjit\n'
        f'  File "{jax}/experimental/multihost_utils.py", line 159 in process_allgather\n'
        f'  File "{program}", line 2 in main\n',
        1: f'  File "{jax}/_src/interpreters/pxla.py", line 395 in __call__\n  File "{program}", line 3 in main\n',
        2: f'  File "{program}", line 3 in main\n',
    }
    run = RunDir(tmp_path / "run")
    for rank, frames in stacks.items():
        run.log(0, rank).parent.mkdir(parents=True, exist_ok=True)
        run.log(0, rank).write_text(f"{PROGRAM_STACKS}\nThread 0x01 (most recent call first):\n{frames}")
    found = stacks_of(run, 0, 3)
    assert where(found) == (
        f'rank 0 waits for other ranks in process_allgather ({program}, line 2: sync_global_devices("save")); '
        f"rank 1 waits for other ranks in a computation of JAX ({program}, line 3: loss = step(batch)); "
        f"rank 2 is in main ({program}, line 3: loss = step(batch))"
    )
    assert waited_for(found) == (2,)
    assert found[2] == (Frame(str(program), 3, "main"),)
