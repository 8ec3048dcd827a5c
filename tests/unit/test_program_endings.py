"""How a program's end becomes an exit code and a sentence."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from messages import mentions

from ortflow.workflow.program.endings import Known, ending_of, last_error

TRACEBACK = """\
step 3
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    main()
  File "/home/me/model.py", line 7, in main
    raise ValueError("no such thing")
ValueError: no such thing
"""
ARGPARSE = "usage: train.py [-h] [--lr LR]\ntrain.py: error: unrecognized arguments: --x\n"


@pytest.mark.parametrize(
    ("known", "code", "says"),
    [
        ({"status": 0}, 0, ""),
        ({"status": 0, "total": 10, "step": 10}, 0, ""),
        ({"status": 0, "total": 10, "step": 3, "finished": True}, 0, ""),
        ({"status": 0, "total": 10, "step": 3}, 1, "exit code 0 at step 3 of 10 … nothing asked"),
        ({"status": 0, "total": 10, "step": 3, "stop_reason": "SIGTERM"}, 75, "stopped as asked (SIGTERM)"),
        ({"status": 0, "total": 10, "step": 10, "stop_reason": "SIGTERM"}, 0, ""),
        ({"status": 0, "stop_reason": "SIGTERM"}, 75, "stopped as asked"),
        ({"status": -9}, 1, "killed by SIGKILL"),
        ({"status": -9, "out_of_memory": True}, 1, "killed by SIGKILL (out of memory)"),
        ({"status": 137, "out_of_memory": True}, 1, "killed by SIGKILL (out of memory)"),
        ({"status": -11}, 1, "killed by SIGSEGV"),
        ({"status": -15}, 1, "killed by SIGTERM"),
        ({"status": -15, "stop_reason": "cancel"}, 75, "ended by SIGTERM after the request"),
        ({"status": 143, "stop_reason": "cancel"}, 75, "ended by SIGTERM after the request"),
        ({"status": -9, "stop_reason": "cancel", "killed": "was killed: late"}, 75, "rank 1 was killed: late"),
        ({"status": -9, "killed": "was killed"}, 1, "rank 1 was killed"),
        ({"status": 1, "tail": TRACEBACK}, 1, "exit code 1: ValueError: no such thing (/home/me/model.py:7)"),
        ({"status": 1, "tail": TRACEBACK, "stop_reason": "cancel"}, 1, "ValueError: no such thing"),
        ({"status": 1, "stop_reason": "cancel"}, 75, "exit code 1 after the request"),
        ({"status": 2, "tail": ARGPARSE}, 2, "exit code 2: unrecognized arguments: --x"),
        ({"status": 2, "tail": ARGPARSE, "stepped": True}, 1, "exit code 2"),
        ({"status": 1, "tail": "ModuleNotFoundError: No module named 'x'"}, 2, "No module named 'x'"),
        ({"status": 1, "tail": "ImportError: x", "stepped": True}, 1, "ImportError: x"),
        ({"status": 1, "rejected": "cannot load the checkpoint of step 4: x"}, 2, "rank 1 cannot load the checkpoint"),
        ({"status": 2, "tail": ARGPARSE, "seconds": 3600.0}, 1, "exit code 2"),
        ({"status": 1, "tail": "RuntimeError: Connection closed by peer"}, 1, "Connection closed"),
        ({"status": 1, "tail": "RuntimeError: Connection closed by peer", "stop_reason": "x"}, 75, "after the request"),
    ],
)
def test_an_ending(known: dict[str, Any], code: int, says: str) -> None:
    ending = ending_of(Known(**known), "rank 1")
    assert ending.code == code
    assert mentions(ending.sentence, says) if says else ending.sentence == ""


@pytest.mark.parametrize(
    ("line", "second_hand"),
    [
        ("RuntimeError: [1] Connection closed by peer [127.0.0.1]:4321", True),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("ortflow.program.errors.CommitFailed: the checkpoint of step 3 was not made: rank 0: OSError: x", True),
        ("ValueError: shapes differ", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_errors_that_another_rank_has_caused(line: str, second_hand: bool) -> None:
    tail = TRACEBACK.replace("ValueError: no such thing", line)
    assert ending_of(Known(1, tail=tail), "rank 1").communication == second_hand


@pytest.mark.parametrize(
    ("tail", "found"),
    [
        ("", None),
        ("all is well\nAn Error: is not at the start of a name\n", None),
        ("KeyError: 'a'\nValueError: b\nthe end", "ValueError: b"),
        ("torch.cuda.OutOfMemoryError: CUDA", "torch.cuda.OutOfMemoryError: CUDA"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        (TRACEBACK, "ValueError: no such thing (/home/me/model.py:7)"),
        (TRACEBACK.replace("ValueError", "my.Trouble"), "my.Trouble: no such thing (/home/me/model.py:7)"),
        (TRACEBACK.replace("ValueError: no such thing", "_queue.Empty"), "_queue.Empty (/home/me/model.py:7)"),
        ("step\nmy.Trouble: none\n  indented\nplain: text\n", None),
    ],
)
def test_the_last_error_of_a_log(tail: str, found: str | None) -> None:
    assert last_error(tail) == found


def test_signals_have_names() -> None:
    number = int(signal.SIGRTMAX) - 1
    assert mentions(ending_of(Known(-number), "rank 0").sentence, f"signal {number}")


@pytest.mark.parametrize(
    ("tail", "fix"),
    [
        ("ImportError: No module named 'onnxruntime.training'", "install onnxruntime-training … ortflow.torch"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "lower the batch of a rank"),
        ("RuntimeError: cannot load MPI library", "pip install mpich"),
        ("Fatal error in internal_Init: Other MPI error, error stack:\nMPIR_Init_thread", "MPI did not start"),
        ("MPI_Init failed: no transport", "srun --mpi"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error", "NCCL_DEBUG=WARN"),
    ],
)
def test_a_common_error_is_answered(tail: str, fix: str) -> None:
    """The rows of docs/errors.md."""
    ending = ending_of(Known(status=1, tail=f"step 3\n{tail}\n", stepped=True), "rank 1")
    assert mentions(ending.sentence, fix)
