"""The protocol between a training program's library and its rank process."""

from __future__ import annotations

import socket
import threading

import pytest
from waits import PATIENCE

from ortflow.workflow.program.wire import MAX_LINE, Connection, Lines, WireError, decode, encode, parse_address

STEP = {"kind": "step", "step": 3, "checks": 4}


def test_messages_arrive_whole_whatever_the_pieces() -> None:
    messages = [STEP, {"kind": "log", "step": 1, "values": {"loss": 0.1, "text": "ü\n"}}, {"kind": "bye"}]
    data = b"".join(map(encode, messages))
    for size in (1, 2, 7, len(data)):
        lines = Lines()
        received = [m for at in range(0, len(data), size) for m in lines.feed(data[at : at + size])]
        assert received == messages


@pytest.mark.parametrize("line", [
    b"GET / HTTP/1.1", b"[]", b"3", b"{}", b'{"kind": "other"}', b'{"kind": []}', b'{"kind": "step", "step": 1}',
    b'{"kind": "step", "step": "1", "checks": 0}', b'{"kind": "step", "step": true, "checks": 0}', b"\xff\xfe",
    pytest.param(b"[" * 200_000, id="nested"),
])  # fmt: skip
def test_other_data_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode(line)


def test_a_line_without_end_is_refused() -> None:
    lines = Lines()
    assert list(lines.feed(b"x" * MAX_LINE)) == []
    with pytest.raises(WireError, match=str(MAX_LINE)):
        list(lines.feed(b"x"))
    with pytest.raises(WireError, match="log"):
        encode({"kind": "log", "step": 0, "values": {"text": "x" * MAX_LINE}})


def test_several_threads_may_send_and_closing_ends_a_receiver() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Connection(ours), Connection(theirs)
    threads = [
        threading.Thread(target=lambda n=n: [sender.send({**STEP, "step": n}) for _ in range(200)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    steps = [(receiver.receive() or {})["step"] for _ in range(800)]
    assert sorted(steps) == sorted([*range(4)] * 200)
    for thread in threads:
        thread.join()
    end: list[object] = []
    waiting = threading.Thread(target=lambda: end.append(receiver.receive()))
    waiting.start()
    sender.close()
    waiting.join(PATIENCE)
    assert end == [None]
    receiver.close()


def test_addresses() -> None:
    assert parse_address("127.0.0.1:80") == ("127.0.0.1", 80)
    for text in ("", "host", "host:", ":80", "host:port"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(text)
