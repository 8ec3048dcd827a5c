"""How the rank processes of an attempt find each other: rank 0 writes its address into the run directory.

It is the only thing that needs the shared folder. Ranks then connect to rank 0, and all get the same description of the
world: machines, addresses, ports. The file has a token, so that nobody else who reaches the port is taken for a rank.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ortflow.workflow.errors import CommunicationError, OrtflowError
from ortflow.workflow.program.channel import Lost, Message, Peer
from ortflow.workflow.program.tokens import is_token
from ortflow.workflow.program.variables import World
from ortflow.workflow.ranks import Place
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.system.cores import Grant, cores_of, grant_of_this_process
from ortflow.workflow.system.files import read_whole

SECONDS = 600.0
"""Seconds in which all ranks must have found each other: nodes may start at different times."""
ANSWER = 20.0
POLL = 0.02
PORTS = range(20000, 32768)
_OLD = re.compile(r"\.rendezvous-\d+")


def rendezvous_file(run_dir: RunDir, attempt: int) -> Path:
    """Where rank 0's address is in an attempt."""
    return run_dir.root / f".rendezvous-{attempt}"


def alone(place: Place, cpus_per_rank: int | None) -> World:
    """The world of a single rank."""
    ports = free_ports(3)
    cores = cpus_per_rank or cores_of(grant := grant_of_this_process(place.host), [grant])
    return World((place.host,), ("127.0.0.1",), (ports[0],), ports[1], ports[2], (cores,))


def gather(
    run_dir: RunDir, place: Place, attempt: int, cpus_per_rank: int | None, leave: Callable[[], None]
) -> tuple[World, dict[int, Peer]]:
    """Rank 0: wait for all others. Returns the world, and the connection to each.

    `cpus_per_rank` is that of the run file. `leave` is called again and again, and raises to end the wait. Raises
    OrtflowError if a rank does not come.
    """
    for path in run_dir.root.iterdir():
        if _OLD.fullmatch(path.name):
            with suppress(OSError):
                path.unlink()
    token, size = secrets.token_hex(16), place.world_size
    one_machine = place.local_size == size
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        # Ranks of one machine need no other address, and nothing listens on a network then.
        listener.bind(("127.0.0.1" if one_machine else "", 0))
        listener.listen(size)
        port = listener.getsockname()[1]
        addresses = ["127.0.0.1"] if one_machine else own_addresses()
        file = rendezvous_file(run_dir, attempt)
        _publish(file, attempt, {"addresses": addresses, "port": port, "token": token, "host": place.host})
        peers, joined = _accept_all(listener, size, token, leave)
    with suppress(OSError):
        file.unlink()
    world = _world(place, cpus_per_rank, peers, joined, one_machine=one_machine)
    for peer in peers.values():
        peer.send({"world": vars(world)})
    return world, peers


def join(
    run_dir: RunDir, place: Place, attempt: int, cpus_per_rank: int | None, leave: Callable[[], None]
) -> tuple[World, Peer]:
    """Another rank: find rank 0. Returns the world and the connection to rank 0. Parameters as `gather`."""
    file, end, reason = rendezvous_file(run_dir, attempt), time.monotonic() + SECONDS, "it has not written its address"
    while time.monotonic() < end:
        leave()
        try:
            contact = json.loads(read_whole(file))
        except (OSError, ValueError, RecursionError):
            time.sleep(POLL)
            continue
        peer = _connect(contact)
        if peer is None:
            reason = f"none of its addresses answers: {', '.join(contact['addresses'])}, port {contact['port']}"
            time.sleep(10 * POLL)
            continue
        grant = grant_of_this_process(place.host)
        peer.send(
            {
                "token": contact["token"], "rank": place.rank, "host": place.host, "port": free_ports(1)[0],
                "reached": peer.stream.getpeername()[0],
                "grant": [sorted(grant.cores), grant.quota, grant.cgroup], "wanted": cpus_per_rank,
            }
        )  # fmt: skip
        while True:
            leave()
            try:
                message = peer.receive(0.5)
            except Lost as error:
                if time.monotonic() < end and isinstance(error.__cause__, TimeoutError):
                    continue
                reason = str(error)
                break
            return _decoded(message), peer
        peer.close()
        time.sleep(10 * POLL)
    raise CommunicationError(f"rank {place.rank} does not find rank 0 within {SECONDS:g} s: {reason}")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on.

    Below those that Linux gives to outgoing connections (32768 to 60999): the program binds a port seconds later, and
    meanwhile any process of the machine may get one of those.
    """
    sockets = []
    try:
        for _ in range(count):
            probe = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(probe)
            for port in [*random.SystemRandom().sample(PORTS, 100), 0]:
                with suppress(OSError):
                    probe.bind(("", port))
                    break
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def own_addresses() -> list[str]:
    """IPv4 addresses of this machine, that of its name first, without the loopback unless there is no other."""
    import psutil

    addresses: list[str] = []
    with suppress(OSError):
        addresses.append(socket.gethostbyname(socket.gethostname()))
    for entries in psutil.net_if_addrs().values():
        addresses += [entry.address for entry in entries if entry.family == socket.AF_INET]
    # Debian gives a machine's name the address 127.0.1.1, which no other machine reaches.
    network_addresses = [address for address in dict.fromkeys(addresses) if not address.startswith("127.")]
    return [*network_addresses, "127.0.0.1"]


def _publish(file: Path, attempt: int, content: Message) -> None:
    """Write the file at once, for this user only. Raises OSError that names it."""
    temporary = file.with_name(f"{file.name}.a{attempt}-{secrets.token_hex(4)}")  # a name that launchers sweep
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            json.dump(content, opened)
        os.replace(temporary, file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise OSError(error.errno, error.strerror, str(file)) from error


def _accept_all(
    listener: socket.socket, size: int, token: str, leave: Callable[[], None]
) -> tuple[dict[int, Peer], dict[int, Message]]:
    end = time.monotonic() + SECONDS
    peers: dict[int, Peer] = {}
    joined: dict[int, Message] = {}
    listener.settimeout(POLL * 5)
    while len(peers) < size - 1:
        leave()
        if time.monotonic() > end:
            missing = sorted({*range(1, size)} - {*peers})
            names = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
            raise OrtflowError(f"ranks {names} have not connected to rank 0 within {SECONDS:g} s")
        try:
            stream, _ = listener.accept()
        except TimeoutError:
            continue
        peer = Peer(stream)
        try:
            message = peer.receive(ANSWER)
        except Lost:
            peer.close()
            continue
        rank = message.get("rank")
        if not is_token(message.get("token"), token) or type(rank) is not int or not 0 < rank < size:
            peer.close()
            continue
        peers[rank], joined[rank] = peer, message
    return peers, joined


def _world(
    place: Place, cpus_per_rank: int | None, peers: dict[int, Peer], joined: dict[int, Message], *, one_machine: bool
) -> World:
    ranks = range(place.world_size)
    remote = [joined[rank]["reached"] for rank in ranks[1:] if joined[rank]["host"] != place.host]
    # The address by which a rank of another machine has reached this one: not all that it has need be routed.
    local_address = "127.0.0.1" if one_machine or not remote else str(remote[0])
    hosts, addresses, ports = [place.host], [local_address], free_ports(1)
    grants = [grant_of_this_process(place.host)]
    for rank in ranks[1:]:
        message = joined[rank]
        cores, quota, cgroup = message["grant"]
        hosts.append(str(message["host"]))
        grants.append(Grant(hosts[-1], frozenset(cores), quota, cgroup))
        addresses.append(local_address if hosts[-1] == place.host else peers[rank].stream.getpeername()[0])
        ports.append(int(message["port"]))
    main, jax = free_ports(2)
    cores_each = tuple(cpus_per_rank or cores_of(grant, grants) for grant in grants)
    return World(tuple(hosts), tuple(addresses), tuple(ports), main, jax, cores_each)


def _connect(contact: Message) -> Peer | None:
    for address in contact["addresses"]:
        try:
            return Peer(socket.create_connection((address, contact["port"]), timeout=3.0))
        except OSError:
            continue
    return None


def _decoded(message: Message) -> World:
    if not isinstance(message.get("world"), dict):
        raise CommunicationError("rank 0 sent no description of the ranks")
    values = message["world"]
    lists = {key: tuple(values[key]) for key in ("hosts", "addresses", "ports", "cores")}
    return World(**lists, main_port=int(values["main_port"]), jax_port=int(values["jax_port"]))
