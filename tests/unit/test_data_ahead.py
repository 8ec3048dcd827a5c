"""Groups that a thread reads while those before them are used."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest
from waits import PATIENCE, wait_until

from ortflow.workflow.data.ahead import ReadAhead


class Groups:
    """Five groups of two numbers; `gate` holds back those behind the first."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.done = 0

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(5):
            self.threads.append(threading.current_thread().name)
            if number:
                assert self.gate.wait(PATIENCE)
            self.done += 1
            yield [2 * number, 2 * number + 1]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_the_order_is_that_of_the_groups(depth: int) -> None:
    groups = Groups()
    with ReadAhead(groups, depth, worthwhile=-1.0) as ahead:
        assert list(ahead) == list(range(10))
        assert list(ahead) == []
    assert groups.threads[0] == "MainThread"
    assert all(name.startswith("ortflow-data") for name in groups.threads[1:])


def test_a_hurried_reader_reads_itself() -> None:
    groups = Groups()
    assert list(ReadAhead(groups, 2, worthwhile=math.inf)) == list(range(10))
    assert set(groups.threads) == {"MainThread"}


def test_by_default_a_reader_that_asks_at_once_reads_itself() -> None:
    threads: list[str] = []

    def groups() -> Iterator[list[int]]:
        for number in range(500):
            threads.append(threading.current_thread().name)
            yield [number]

    with ReadAhead(groups(), 1) as ahead:
        assert list(ahead) == list(range(500))
    # A busy machine may make it wait longer than half a millisecond now and then.
    assert threads.count("MainThread") > 100


def test_by_default_a_slow_reader_is_read_for() -> None:
    groups = Groups()
    with ReadAhead(groups, 1) as ahead:
        for _ in ahead:
            time.sleep(0.002)
    # The first is read before anything is known about the reader.
    assert groups.threads[2:] == ["ortflow-data_0"] * 3


@pytest.mark.parametrize("depth", [1, 3])
def test_so_many_groups_are_read_and_no_more(depth: int) -> None:
    groups = Groups()
    with ReadAhead(groups, depth, worthwhile=-1.0) as ahead:
        assert next(ahead) == 0
        wait_until(lambda: len(groups.threads) >= 1 + depth)
        time.sleep(0.05)
        assert len(groups.threads) == 1 + depth


def test_closing_waits_for_the_group_that_is_read_and_reads_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups()
    ahead = ReadAhead(groups, 3, worthwhile=-1.0)
    groups.gate.clear()
    assert next(ahead) == 0
    wait_until(lambda: len(groups.threads) >= 2)
    shutdown = ahead._executor.shutdown

    def closing(**how: bool) -> None:
        threading.Timer(0.1, groups.gate.set).start()
        shutdown(**how)

    monkeypatch.setattr(ahead._executor, "shutdown", closing)
    ahead.close()
    assert groups.done == 2, "the second group was read whole before close returned, and none behind it"
    assert list(ahead) == []


def test_a_failure_is_raised_where_its_group_is_due() -> None:
    def groups() -> Iterator[list[int]]:
        yield [1, 2]
        raise OSError("damaged")

    with ReadAhead(groups(), 2, worthwhile=-1.0) as ahead:
        assert (next(ahead), next(ahead)) == (1, 2)
        with pytest.raises(OSError, match="damaged"):
            next(ahead)
