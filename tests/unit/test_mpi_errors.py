"""Errors of MPI: their sentence, and what becomes of them on real ranks."""

from __future__ import annotations

import pytest
from real_ranks import all_good

from ortflow.workflow.comm.mpi_errors import mpi_errors, sentence

OF_MPICH = """Other MPI error, error stack:
internal_Sendrecv_c(323): MPI_Sendrecv_c(sendbuf=0x557f, sendcount=11776, MPI_FLOAT, 0, 32767) failed
MPIDI_IPC_rndv_cb(176)..:\x20
MPIDI_CMA_copy_data(68).:\x20
copy_iovs(224)..........: process_vm_readv failed (errno 3)"""


@pytest.mark.parametrize(
    ("report", "call", "reason"),
    [
        (OF_MPICH, "MPI_Sendrecv_c", "process_vm_readv failed (errno 3)"),
        ("MPI_ERR_TRUNCATE: message truncated", "MPI", "MPI_ERR_TRUNCATE: message truncated"),
        ("", "MPI", "unknown error"),
    ],
)
def test_a_report_is_one_sentence_with_the_call_and_the_innermost_reason(report: str, call: str, reason: str) -> None:
    assert sentence(report).startswith(f"{call} failed: {reason}; ")


def test_other_errors_pass() -> None:
    @mpi_errors
    def fails() -> None:
        raise RuntimeError("not of MPI")

    with pytest.raises(RuntimeError, match="not of MPI"):
        fails()


LONGER = """
import numpy as np
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.comm.mpi_errors import MpiError
from ortflow.workflow.device.cpu import HostBuffer

comm = MpiCommunicator()
buffer = HostBuffer(np.zeros(32 if comm.rank == 0 else 8, np.float32))
try:
    (comm.start_send(buffer, 1) if comm.rank == 0 else comm.start_receive(buffer, 0)).wait()
    print("good" if comm.rank == 0 else "a message was cut without an error")
except MpiError as error:
    print("good" if comm.rank == 1 and "runcat" in str(error) and "\\n" not in str(error) else repr(error))
comm.close()
"""


def test_a_failed_call_of_a_real_mpi_is_such_an_error() -> None:
    all_good(2, LONGER)
