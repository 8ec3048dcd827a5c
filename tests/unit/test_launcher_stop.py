"""Requests to stop: what each signal, the stop file and the time limit ask for, and in which order they count."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_clock import FakeClock
from full_disks import mounted
from signal_handlers import restored

from ortflow.launchers.stop import FILE_PERIOD, Stop, interruptible, read_request, taken_over, write_request
from ortflow.workflow.errors import Preempted


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with restored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # In the background or under nohup, these are ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        yield


def send(*numbers: signal.Signals) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("numbers", "reason", "now"),
    [
        ((), None, False),
        ((signal.SIGINT,), "interrupt", False),
        ((signal.SIGINT, signal.SIGINT), "interrupt", True),
        ((signal.SIGTERM,), "SIGTERM", False),
        ((signal.SIGTERM, signal.SIGTERM), "SIGTERM", False),
        ((signal.SIGHUP,), "SIGHUP", False),
        ((signal.SIGTERM, signal.SIGHUP), "SIGTERM", False),
        ((signal.SIGTERM, signal.SIGINT), "SIGTERM", True),
        ((signal.SIGINT, signal.SIGTERM), "interrupt", False),
    ],
)
def test_only_a_ctrl_c_after_another_request_stops_without_saving(
    tmp_path: Path, numbers: tuple[signal.Signals, ...], reason: str | None, now: bool
) -> None:
    stop = Stop(tmp_path / "stop")
    assert (stop.now, stop.signalled) == (False, False)
    with stop.listening():
        send(*numbers)
    assert (stop.check(), stop.now) == (reason, now)
    assert stop.signalled == (reason in ("SIGTERM", "SIGHUP"))


def test_signals_after_the_end_do_not_kill_the_supervisor(tmp_path: Path) -> None:
    stop = Stop(tmp_path / "stop")
    with stop.listening():
        pass
    send(signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    assert stop.reason == "SIGTERM"
    assert stop.now


def test_the_file_is_read_at_once_and_then_once_per_period(tmp_path: Path) -> None:
    file, clock = tmp_path / "stop", FakeClock()
    stop = Stop(file, clock=clock)
    write_request(file, "cancel")
    assert stop.check() == "cancel", "the first check does not wait"
    file.unlink()

    stop = Stop(file, clock=clock)
    assert stop.check() is None
    write_request(file, "cancel")
    clock.now += FILE_PERIOD * 0.9
    assert stop.check() is None, "a slow file system is not asked at every tick"
    clock.now += FILE_PERIOD * 0.1
    assert stop.check() == "cancel"


@pytest.mark.parametrize("uptime", [0.0, 0.001])
def test_the_first_check_reads_the_file_on_a_machine_that_has_just_booted(tmp_path: Path, uptime: float) -> None:
    clock = FakeClock()
    clock.now = uptime
    write_request(tmp_path / "stop", "cancel")
    assert Stop(tmp_path / "stop", clock=clock).check() == "cancel"


def test_a_fresh_check_does_not_wait_for_the_period(tmp_path: Path) -> None:
    file, clock = tmp_path / "stop", FakeClock()
    stop = Stop(file, clock=clock)
    assert stop.check() is None
    write_request(file, "cancel", now=True)
    assert stop.check() is None
    assert not stop.now
    assert stop.settle() == "cancel"
    assert stop.now


def test_the_request_of_growth_is_none_of_the_users(tmp_path: Path) -> None:
    write_request(tmp_path / "stop", "growth")
    assert Stop(tmp_path / "stop").check() is None


def test_the_time_limit_counts_from_the_start_and_after_other_reasons(tmp_path: Path) -> None:
    clock = FakeClock()
    stop, other = (Stop(tmp_path / "stop", 60.0, clock) for _ in range(2))
    clock.now += 59.9
    assert stop.check() is None
    write_request(tmp_path / "stop", "cancel")
    assert other.settle() == "cancel"
    (tmp_path / "stop").unlink()
    clock.now = 1060.0
    assert stop.check() == "time limit"
    assert not stop.now
    assert other.check() == "cancel"


@pytest.mark.parametrize("request_", ["cancel", "scancel", "scheduler"])
def test_a_cancel_replaces_a_signal_once(tmp_path: Path, request_: str) -> None:
    stop = Stop(tmp_path / "stop")
    with stop.listening():
        send(signal.SIGTERM)
    stop.take("interrupt")
    assert (stop.reason, stop.signalled) == ("SIGTERM", True), "only a cancel does"
    stop.take(request_)
    assert (stop.reason, stop.signalled) == (request_, False)
    stop.take("cancel" if request_ != "cancel" else "scancel")
    assert stop.reason == request_, "the first request counts"


def test_a_cancel_does_not_replace_an_interrupt(tmp_path: Path) -> None:
    stop = Stop(tmp_path / "stop")
    with stop.listening():
        send(signal.SIGINT)
    stop.take("cancel")
    assert stop.reason == "interrupt"


def test_a_signal_before_the_first_rank_leaves_at_once(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before = signal.getsignal(number)
        with pytest.raises(Preempted, match=number.name), interruptible():
            send(number)
        assert signal.getsignal(number) == before


def test_handlers_are_restored_but_not_over_later_ones() -> None:
    def inner(number: int, frame: object) -> None: ...

    def outer(number: int, frame: object) -> None: ...

    before = signal.getsignal(signal.SIGTERM)
    with taken_over(outer):
        assert signal.getsignal(signal.SIGTERM) is outer
    assert signal.getsignal(signal.SIGTERM) == before
    with taken_over(outer):
        signal.signal(signal.SIGTERM, inner)
    assert signal.getsignal(signal.SIGTERM) is inner
    with taken_over(outer, for_good=True):
        pass
    assert signal.getsignal(signal.SIGTERM) is outer


@pytest.mark.parametrize("ignored", [False, True])
def test_a_signal_that_nohup_ignores_stays_ignored_unless_it_is_wanted(ignored: bool) -> None:
    def handler(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with taken_over(handler, ignored=ignored):
        assert signal.getsignal(signal.SIGHUP) is (handler if ignored else signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_ignored_signals_are_left_alone_by_default() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with taken_over(lambda number, frame: None):
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_requests_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "stop"
    assert read_request(file) is None
    write_request(file, "cancel")
    assert read_request(file) == {"reason": "cancel", "now": False}
    write_request(file, "cancel", now=True)
    assert read_request(file) == {"reason": "cancel", "now": True}
    for text in ("", "{", "[1]"):
        file.write_text(text)
        assert read_request(file) == {}


def test_a_request_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_request(tmp_path / "file" / "stop", "cancel")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "64k") as place:
        yield place


def test_on_a_full_disk_a_request_is_an_empty_file_unless_it_must_say_now(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (small_disk / "filler").write_bytes(bytes(1 << 17))
    write_request(small_disk / "stop", "cancel")
    assert read_request(small_disk / "stop") == {}
    with pytest.raises(OSError, match="No space"):
        write_request(small_disk / "stop", "cancel", now=True)
