"""The order in which ranks ended, without polling in between."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ortflow.launchers.supervision.exits import Exits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")

RANK = """
import os, sys, time
from pathlib import Path
from ortflow.workflow.rank import redirect_output
redirect_output(Path(sys.argv[1]))
os.write(int(os.environ["PMI_FD"]), b"!")
time.sleep(60)
"""


class Rank:
    """A process with a rank's log and, in place of the connection to Hydra, a pipe."""

    def __init__(self, log: Path) -> None:
        self.hydra, connection = os.pipe()
        os.set_inheritable(connection, True)
        command, own = [sys.executable, "-c", RANK, str(log)], {**os.environ, "PMI_FD": str(connection)}
        self.process = subprocess.Popen(command, env=own, pass_fds=[connection])
        self.connection = connection
        os.close(connection)
        self.log = log

    def ready(self) -> None:
        assert os.read(self.hydra, 1) == b"!"

    def kill(self) -> None:
        """Returns as soon as Hydra would know; the process may still be dying then."""
        self.process.kill()
        assert os.read(self.hydra, 1) == b""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.hydra)


def watches() -> int:
    """Descriptors of inotify: threads of earlier tests open and close other files at any moment."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own, and what other threads close
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("inotify" in link for link in links)


@pytest.fixture
def exits(tmp_path: Path) -> Iterator[Exits]:
    exits = Exits(tmp_path)
    yield exits
    exits.close()


@pytest.fixture
def ranks(tmp_path: Path, exits: Exits) -> Iterator[list[Rank]]:
    started = [Rank(tmp_path / f"rank-{rank:04d}.log") for rank in range(6)]
    for rank in started:
        rank.ready()
    yield started
    for rank in started:
        rank.close()


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_in_which_the_connections_closed(exits: Exits, ranks: list[Rank], seed: int) -> None:
    assert exits.order() == []
    order = random.Random(seed).sample(range(6), 6)
    for count, rank in enumerate(order, start=1):
        ranks[rank].kill()
        assert exits.order() == order[:count]
    exits.close()
    assert exits.order() == order


def test_the_log_stays_open_behind_the_connection(ranks: list[Rank]) -> None:
    for rank in ranks:
        opened = Path("/proc", str(rank.process.pid), "fd")
        assert max(int(each.name) for each in opened.iterdir() if each.resolve() == rank.log) > rank.connection


def test_a_child_that_lives_longer_keeps_only_the_output(exits: Exits, tmp_path: Path) -> None:
    log = tmp_path / "rank-0000.log"
    child = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); os._exit(0)"
    subprocess.run([sys.executable, "-c", f"{RANK.split('os.write')[0]}{child}", str(log)], check=True)
    assert exits.order() == [0]
    os.kill(int(log.read_text()), signal.SIGKILL)


def test_without_a_descriptor_behind_the_connection_a_rank_runs(exits: Exits, tmp_path: Path) -> None:
    log = tmp_path / "rank-0003.log"
    command = [sys.executable, "-c", f"{RANK.split('os.write')[0]}print('here')", str(log)]
    subprocess.run(command, env={**os.environ, "PMI_FD": str(1 << 30)}, check=True)
    assert (log.read_text(), exits.order()) == ("here\n", [3])


def test_other_files_do_not_count(exits: Exits, tmp_path: Path) -> None:
    for name in ("launcher.log", "rank-0001.log.old", "rank-0002.txt"):
        (tmp_path / name).write_text("")
    assert exits.order() == []
    (tmp_path / "rank-0012.log").write_text("")
    (tmp_path / "rank-0012.log").write_text("again")
    assert exits.order() == [12]


def test_without_inotify_there_is_no_order(tmp_path: Path) -> None:
    before = watches()
    exits = Exits(tmp_path / "missing")
    assert exits.order() == []
    assert watches() == before
    exits.close()


def test_without_a_descriptor_to_spare_there_is_no_order(tmp_path: Path) -> None:
    free = os.open(tmp_path, os.O_RDONLY)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        exits = Exits(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (tmp_path / "rank-0001.log").write_text("")
    assert exits.order() == []
    exits.close()


def test_the_descriptor_of_a_closed_input_is_one_like_others(tmp_path: Path) -> None:
    """A launcher started with `<&-` has its first file at descriptor 0."""
    saved = os.dup(0)
    os.close(0)
    try:
        exits = Exits(tmp_path)
        assert os.readlink("/proc/self/fd/0") == "anon_inode:inotify"
        (tmp_path / "rank-0002.log").write_text("")
        assert exits.order() == [2]
        exits.close()
        assert not os.path.lexists("/proc/self/fd/0")
        missing = Exits(tmp_path / "missing")
        assert missing.order() == []
        assert not os.path.lexists("/proc/self/fd/0")
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_nothing_stays_open(tmp_path: Path) -> None:
    before = watches()
    exits = Exits(tmp_path)
    exits.close()
    exits.close()
    assert watches() == before
    assert exits.order() == []
