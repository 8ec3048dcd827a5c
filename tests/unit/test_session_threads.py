"""Threads that open their first sessions at once."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions import session


def test_threads_share_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def share(device: str, index: int) -> None:
        time.sleep(0.1)  # the other thread comes meanwhile
        made.append((device, index))

    monkeypatch.setattr(session, "_share_memory", functools.cache(share))
    with ThreadPoolExecutor(2) as threads:
        opened = [threads.submit(session._save_memory, onnxruntime.SessionOptions(), CpuDevice()) for _ in range(2)]
        for each in opened:
            each.result()
    assert made == [("Cpu", 0)]
