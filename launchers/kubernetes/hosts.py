"""The hosts that the operator gives to a run, and whether each answers on its ssh port. Used by the keeper."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ortflow.workflow.clock import SYSTEM_CLOCK, Clock
from ortflow.workflow.errors import OrtflowError

HOSTFILE = Path("/etc/mpi/hostfile")
TIMEOUT = 3.0
"""Seconds in which a host that is there says who it is."""
PERIOD = 0.5
TELL = 30.0
"""Seconds between two words about hosts that are waited for."""
_ENTRY = re.compile(r"^([A-Za-z0-9.-]+)(?:\s+slots=\d+|:\d+)?\s*$")


def read_hosts(path: Path = HOSTFILE) -> list[str]:
    """Names of the hosts, in the operator's order; raises OrtflowError where the file is not the operator's."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise OrtflowError(f"there is no {path}: this pod was not made by the mpi-operator") from error
    found = [_ENTRY.match(line) for line in lines]
    if not lines or not all(found):
        raise OrtflowError(f"{path} lists no hosts that can be understood: {lines[:2]}")
    return [match[1] for match in found if match]


def short(host: str) -> str:
    """A pod's own name, which it has as its hostname."""
    return host.partition(".")[0]


def address(host: str, port: int) -> str | None:
    """The address at which the host answers as ssh does; None if it does not."""
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT) as connection:
            connection.settimeout(TIMEOUT)
            if connection.recv(4) == b"SSH-":
                return str(connection.getpeername()[0])
    except OSError:
        return None
    return None


def addresses(hosts: Sequence[str], port: int) -> dict[str, str | None]:
    """The same of many at once."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(lambda host: address(host, port), hosts), strict=True))


def wait_for(
    hosts: Sequence[str],
    port: int,
    seconds: float,
    look: Callable[[], None],
    say: Callable[[str], None],
    leaves: Callable[[str, str], bool] = lambda host, address: False,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, str]:
    """The addresses of all hosts, as soon as all answer; `look` is called meanwhile, and may raise.

    A host that `leaves`, by its name and address, still answers for a moment and is none to begin on.
    Raises OrtflowError naming those that do not answer within so many seconds.
    """
    end, reported = clock.monotonic() + seconds, clock.monotonic()
    while True:
        # All of them anew: one that has answered may be gone by the time the last one comes.
        known = addresses(hosts, port)
        missing = [host for host, found in known.items() if found is None or leaves(host, found)]
        if not missing:
            return {host: found for host, found in known.items() if found is not None}
        look()
        now = clock.monotonic()
        names = ", ".join(map(short, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        if now > end:
            raise OrtflowError(f"no answer on port {port} within {seconds:.0f} s from {names}")
        if now > reported + TELL:
            reported = now
            say(f"waiting for {names}")
        clock.sleep(PERIOD)
