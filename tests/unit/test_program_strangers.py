"""What reaches the ports of a program's ranks without their token ends no rank."""

from __future__ import annotations

import json
import selectors
import socket
import threading

import pytest
from waits import PATIENCE, wait_until

from ortflow.workflow.program.channel import Lost, Peer
from ortflow.workflow.program.rendezvous import _accept_all
from ortflow.workflow.program.serve import Server
from ortflow.workflow.program.wire import ADDRESS_VARIABLE, TOKEN_VARIABLE, VERSION, encode, parse_address

TOKEN = "0123456789abcdef"
NO_TOKENS = ["é", "\ud800", "", TOKEN[:-1], 3, None, True, [TOKEN], {"token": TOKEN}]
NESTED = b"[" * 200_000


def test_strangers_do_not_end_rank_0() -> None:
    strangers = [json.dumps({"token": token, "rank": 1}).encode() for token in NO_TOKENS]
    strangers += [NESTED, b"\xff", b"3", b"{}"]
    stop = threading.Event()

    def leave() -> None:
        if stop.is_set():
            raise TimeoutError

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def visit() -> None:
            for line in strangers:
                with socket.create_connection(listener.getsockname()) as stream:
                    stream.sendall(line + b"\n")
                    stream.settimeout(PATIENCE)
                    assert stream.recv(1) == b""
            rank = socket.create_connection(listener.getsockname())
            rank.sendall(json.dumps({"token": TOKEN, "rank": 1, "host": "b"}).encode() + b"\n")
            joined.append(rank)

        joined: list[socket.socket] = []
        visitor = threading.Thread(target=visit)
        visitor.start()
        limit = threading.Timer(PATIENCE, stop.set)
        limit.start()
        peers, messages = _accept_all(listener, 2, TOKEN, leave)
        limit.cancel()
        visitor.join(PATIENCE)
    assert list(peers) == [1]
    assert messages[1]["host"] == "b"
    for stream in (peers[1], *joined):
        stream.close()


@pytest.mark.parametrize("token", ["é", "\ud800", ""])
def test_a_program_without_the_token_is_not_answered(token: str) -> None:
    with selectors.DefaultSelector() as selector:
        server = Server(selector)
        address = parse_address(server.variables[ADDRESS_VARIABLE])
        hello = {"kind": "hello", "id": 1, "rank": 0, "world_size": 1, "pid": 1, "level": 1, "version": VERSION}
        with socket.create_connection(address) as stranger, socket.create_connection(address) as program:
            stranger.sendall(encode({**hello, "token": token}))
            program.sendall(encode({**hello, "token": server.variables[TOKEN_VARIABLE]}))
            heard: list[object] = []
            wait_until(lambda: heard.extend(server.receive()) or (server.members and len(server.clients) == 1))
            assert [client.rank for client in server.members] == [0]
            assert len(heard) == 1
            stranger.settimeout(PATIENCE)
            assert stranger.recv(1) == b""
        server.close()


@pytest.mark.parametrize("line", [NESTED, b"\xff", b"3"])
def test_other_data_ends_the_connection_to_a_rank(line: bytes) -> None:
    ours, theirs = _pair()
    with ours, theirs:
        theirs.sendall(line + b"\n")
        with pytest.raises(Lost, match="a message is not"):
            Peer(ours).receive(PATIENCE)


def _pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection: a Peer sets options of TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        return ours, theirs
