"""A rank that cannot leave MPI is ended by the kernel: on GPUs later, since NCCL is left first."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from ortflow.workflow import executor
from ortflow.workflow.executor import finish


@pytest.mark.parametrize(
    ("on_gpus", "together", "seconds"), [(False, True, 10), (True, True, 60), (False, False, 10), (True, False, 10)]
)
def test_the_limit_of_leaving(monkeypatch: pytest.MonkeyPatch, on_gpus: bool, together: bool, seconds: int) -> None:
    done: list[Any] = []
    monkeypatch.setattr(
        executor,
        "signal",
        SimpleNamespace(SIGALRM=signal.SIGALRM, SIG_DFL=0, signal=lambda *_: None, alarm=done.append),
    )
    comm = SimpleNamespace(
        barrier=lambda: done.append("barrier"), abort=lambda code: done.append(code), close=lambda: done.append("close")
    )
    clock = SimpleNamespace(sleep=lambda seconds: done.append("notice"))
    context: Any = SimpleNamespace(comm=comm, clock=clock, spec=SimpleNamespace(on_gpus=on_gpus))
    finish(context, together=together, code=7, notice=2.0)
    assert done == (["barrier", seconds, "close", 0] if together else ["notice", seconds, 7, "close", 0])
