"""The local server of a rank's process, to which the library in the program connects. Never blocks on a program."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
from collections.abc import Iterator

from ortflow.workflow.program.tokens import is_token
from ortflow.workflow.program.wire import ADDRESS_VARIABLE, TOKEN_VARIABLE, VERSION, Lines, Message, WireError, encode

MOST_WAITING = 16 << 20
"""Bytes that a program may leave unread before its connection is closed."""


class Client:
    """A connected library; `rank` is None until its hello."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = stream
        self.rank: int | None = None
        self.pid: int | None = None
        self.signal: int | None = None
        """On which it writes its stacks."""
        self.level, self.stepped, self.checks = 0, False, 0
        self.step: int | None = None
        self.waiting: dict[tuple[str, int], int] = {}
        """Numbers of its requests, by (begin_commit or end_commit, step)."""
        self._lines = Lines()
        self._unsent = b""

    def send(self, message: Message) -> None:
        """Queue a message, and send what the program's side takes."""
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what waits; an error is found by `read`."""
        # BlockingIOError is one, too: the program does not read, and the rest is sent at the next call.
        with contextlib.suppress(OSError):
            while self._unsent:
                self._unsent = self._unsent[self.stream.send(self._unsent) :]

    @property
    def clogged(self) -> bool:
        """Whether the program does not read."""
        return len(self._unsent) > MOST_WAITING

    def read(self) -> tuple[list[Message], bool]:
        """The messages that have arrived, and whether the connection has ended."""
        messages: list[Message] = []
        try:
            while True:
                data = self.stream.recv(1 << 16)
                if not data:
                    return messages, True
                messages.extend(self._lines.feed(data))
        except (BlockingIOError, InterruptedError):
            return messages, False
        except (OSError, WireError):
            return messages, True


class Server:
    """Listens on this machine alone; only programs with the token are answered."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector, self._token = selector, secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.clients: list[Client] = []
        selector.register(self._listener, selectors.EVENT_READ, self)

    @property
    def variables(self) -> dict[str, str]:
        """Where the library finds it."""
        host, port = self._listener.getsockname()
        return {ADDRESS_VARIABLE: f"{host}:{port}", TOKEN_VARIABLE: self._token}

    @property
    def members(self) -> list[Client]:
        """The libraries that have introduced themselves."""
        return [client for client in self.clients if client.rank is not None]

    def receive(self) -> Iterator[tuple[Client, Message | None]]:
        """New messages of all programs; None when a connection has ended. The first of each is a valid hello."""
        with contextlib.suppress(OSError):
            while True:
                stream, _ = self._listener.accept()
                client = Client(stream)
                self.clients.append(client)
                self._selector.register(stream, selectors.EVENT_READ, self)
        for client in [*self.clients]:
            client.flush()
            messages, over = client.read()
            for message in messages:
                if client.rank is None:
                    if message["kind"] != "hello" or not is_token(message["token"], self._token):
                        over = True
                        break
                    if (refusal := self._refusal(message)) is not None:
                        client.send({"kind": "reply", "id": message["id"], "error": refusal})
                        over = True
                        break
                    client.rank, client.level, client.pid = message["rank"], message["level"], message["pid"]
                    stacks = message.get("stacks")
                    client.signal = stacks if type(stacks) is int else None
                yield client, message
            if over or client.clogged:
                self._drop(client)
                if client.rank is not None:
                    yield client, None

    def flush(self) -> None:
        """Send what programs had not taken."""
        for client in self.clients:
            client.flush()

    def _refusal(self, hello: Message) -> str | None:
        """Why a program is not answered; None if it is."""
        if hello["version"] != VERSION:
            return (
                f"ortflow.program speaks version {hello['version']} of the protocol, and the rank's process {VERSION}"
            )
        if any(client.rank == hello["rank"] for client in self.clients):
            return f"another process of rank {hello['rank']} has called ortflow.program already"
        return None

    def _drop(self, client: Client) -> None:
        self.clients.remove(client)
        self._selector.unregister(client.stream)
        client.stream.close()

    def close(self) -> None:
        """End all connections."""
        for client in [*self.clients]:
            self._drop(client)
        self._selector.unregister(self._listener)
        self._listener.close()
