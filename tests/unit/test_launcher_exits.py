"""The order in which processes ended, without polling in between."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ortflow.launchers.exits import Exits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pidfds are Linux's")


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(6)]
    yield started
    for process in started:
        process.kill()
        process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # It stays a zombie: its parent reaps its children in another order.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_the_exits(ranks, seed: int) -> None:
    exits = Exits()
    for rank, process in enumerate(ranks):
        exits.add(rank, process.pid)
    assert exits.order() == []
    order = random.Random(seed).sample(range(6), 6)
    for count, rank in enumerate(order, start=1):
        kill(ranks[rank])
        if count == 3:
            assert exits.order() == order[:3]
    exits.close()
    assert exits.order() == order


def test_one_that_is_gone_is_left_out(ranks) -> None:
    exits, gone = Exits(), ranks[0]
    kill(gone)
    gone.wait()
    exits.add(0, gone.pid)
    exits.add(1, ranks[1].pid)
    kill(ranks[1])
    assert exits.order() == [1]
    exits.close()


def test_nothing_stays_open(ranks) -> None:
    before = os.listdir("/proc/self/fd")
    exits = Exits()
    for rank, process in enumerate(ranks):
        exits.add(rank, process.pid)
    exits.close()
    assert os.listdir("/proc/self/fd") == before
    assert exits.order() == []
