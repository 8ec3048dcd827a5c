"""Messages between the rank processes of an attempt: lines of JSON over TCP, a star with rank 0 at its centre.

They work while the programs hang in a collective call, because no library of the programs is involved.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from ortflow.workflow.errors import CommunicationError

Message = dict[str, Any]
LONGEST = 64 << 20
"""Bytes of the longest message: the list of a checkpoint's files."""
SEND_SECONDS = 30.0
"""Seconds in which a message must be taken by the other side's kernel."""


class Lost(CommunicationError):
    """The other process has ended, or its machine is not reachable."""


class Peer:
    """A connection to another rank process."""

    def __init__(self, stream: socket.socket) -> None:
        # Nagle's algorithm would hold back a short message until the one before it is acknowledged.
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that loses its power sends nothing: the kernel asks after a quiet time.
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
            # macOS has no TCP_KEEPIDLE.
            if hasattr(socket, name):
                stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.stream = stream
        self._rest = b""

    def fileno(self) -> int:
        """The descriptor, for a selector."""
        return self.stream.fileno()

    def send(self, message: Message) -> None:
        """Send a message. Raises Lost."""
        try:
            self.stream.settimeout(SEND_SECONDS)
            self.stream.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError as error:
            raise Lost(f"no connection: {error}") from error

    def read(self) -> list[Message]:
        """The messages that have arrived; call it when the descriptor is readable. Raises Lost at the end."""
        try:
            self.stream.settimeout(SEND_SECONDS)
            data = self.stream.recv(1 << 20)
        except OSError as error:
            raise Lost(f"no connection: {error}") from error
        if not data:
            raise Lost("the connection was closed")
        self._rest += data
        return self.pending()

    def pending(self) -> list[Message]:
        """Whole messages that have arrived behind the last one of `receive`. Raises Lost."""
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) > LONGEST:
            raise Lost("a message is too long")
        return [_decoded(line) for line in lines]

    def receive(self, seconds: float) -> Message:
        """Wait for one message. Raises Lost, also after `seconds`. Messages behind it stay for the next call of it."""
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            self.stream.settimeout(max(0.01, end - time.monotonic()))
            try:
                data = self.stream.recv(1 << 16)
            except OSError as error:
                raise Lost(f"no answer: {error}") from error
            if not data:
                raise Lost("the connection was closed")
            self._rest += data
            if len(self._rest) > LONGEST or time.monotonic() > end:
                raise Lost("no answer in time")
        line, _, self._rest = self._rest.partition(b"\n")
        return _decoded(line)

    def close(self) -> None:
        """Close the connection."""
        self.stream.close()


def _decoded(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Lost("a message is not JSON") from error
    if not isinstance(message, dict):
        raise Lost("a message is not an object")
    return message
