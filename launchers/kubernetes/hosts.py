"""The hosts that the operator gives to a run, and whether each answers on its ssh port. Used by the supervisor
process."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.system.clock import SYSTEM_CLOCK, Clock

HOSTFILE = Path("/etc/mpi/hostfile")
TIMEOUT = 3.0
"""Seconds in which a running host sends its ssh banner."""
PERIOD = 0.5
TELL = 30.0
"""Seconds between two messages about missing hosts."""
_ENTRY = re.compile(r"^([A-Za-z0-9.-]+)(?:\s+slots=\d+|:\d+)?\s*$")


def read_hosts(path: Path = HOSTFILE) -> list[str]:
    """Names of the hosts, in the operator's order; raises OrtflowError if the file is not the operator's."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise OrtflowError(f"there is no {path}: this pod was not made by the mpi-operator") from error
    matches = [_ENTRY.match(line) for line in lines]
    if not lines or not all(matches):
        raise OrtflowError(f"{path} lists no hosts that can be understood: {lines[:2]}")
    return [match[1] for match in matches if match]


def short(host: str) -> str:
    """The pod's name, which is its hostname."""
    return host.partition(".")[0]


def address(host: str, port: int, *, greets: bool = True) -> str | None:
    """The address at which the host answers as ssh does; None if it does not.

    `greets` False: the address at which it accepts a connection.
    """
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT) as connection:
            connection.settimeout(TIMEOUT)
            # The host's kernel accepts immediately; on a busy node the daemon sends its banner seconds later.
            if not greets or connection.recv(4) == b"SSH-":
                return str(connection.getpeername()[0])
    except OSError:
        return None
    return None


def addresses(hosts: Sequence[str], port: int, *, greets: bool = True) -> dict[str, str | None]:
    """The same for many hosts, in parallel."""
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return dict(zip(hosts, pool.map(lambda host: address(host, port, greets=greets), hosts), strict=True))


def wait_for(
    hosts: Sequence[str],
    port: int,
    seconds: float,
    check: Callable[[], None],
    report: Callable[[str], None],
    leaves: Callable[[str, str], bool] = lambda host, address: False,
    clock: Clock = SYSTEM_CLOCK,
) -> dict[str, str]:
    """The addresses of all hosts, as soon as all answer; `check` is called while waiting and may raise.

    A host that `leaves`, given its name and address, still answers for a moment but must not be used.
    Raises OrtflowError with the names of those that do not answer within `seconds`.
    """
    end, last_report = clock.monotonic() + seconds, clock.monotonic()
    while True:
        # Probe all again: one that has answered may be gone when the last one answers.
        host_addresses = addresses(hosts, port)
        missing = [
            host for host, host_address in host_addresses.items() if host_address is None or leaves(host, host_address)
        ]
        if not missing:
            return {host: host_address for host, host_address in host_addresses.items() if host_address is not None}
        check()
        now = clock.monotonic()
        names = ", ".join(map(short, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        if now > end:
            raise OrtflowError(f"no answer on port {port} within {seconds:.0f} s from {names}")
        if now > last_report + TELL:
            last_report = now
            report(f"waiting for {names}")
        clock.sleep(PERIOD)
