"""The connection to the rank process, with one daemon thread that answers it while the program computes.

Used by `Context`. The loop only writes integers and appends to a queue; the thread sends them. Nothing here keeps the
interpreter alive, and a connection that ends makes the program stop.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ortflow.program.checks import Checks
from ortflow.program.errors import ProgramError, RunLost
from ortflow.program.stacks import register_stacks
from ortflow.program.stop_signals import StopSignals
from ortflow.program.world import World
from ortflow.workflow.program.wire import STOP, VERSION, Connection, Message, WireError, parse_address

PERIOD = 0.2
"""Seconds between two reports of the rank's position."""
HELLO_SECONDS = 60.0
"""The rank process accepts connections from the moment it starts the program; a node that swaps needs longer."""


class Link:
    """One rank's connection. Raises ProgramError if the rank process does not answer or refuses this program."""

    def __init__(self, address: str, token: str, world: World, level: int, checks: Checks) -> None:
        self._checks, self._process = checks, os.getpid()
        self.position: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Step and checks; called by the thread."""
        self.deadline: Callable[[float | None], None] = lambda seconds: None
        """Called with the seconds that are left, when the run is asked to stop."""
        self._sent_position = (0, 0)
        self._logs: deque[tuple[int, dict[str, Any]]] = deque()
        self._asked: deque[str] = deque()
        self._flushing = threading.Lock()
        self._replies: dict[int, Message | None] = {}
        self._changed = threading.Condition()
        self._number = 0
        self.lost: str | None = None
        self._stream = self._connect(address)
        self._connection = Connection(self._stream)
        self.signals = StopSignals(self._asked.append)
        self._thread = threading.Thread(target=self._serve, name="ortflow", daemon=True)
        self.signals.install()
        self.signals.open_pipe()
        self._thread.start()
        self.hello = self.request(
            {
                "kind": "hello", "token": token, "rank": world.rank, "world_size": world.size, "pid": os.getpid(),
                "version": VERSION, "level": level, "stacks": register_stacks(),
            }
        )  # fmt: skip
        os.register_at_fork(
            before=self.signals.hold, after_in_parent=self.signals.release, after_in_child=self._leave_in_child
        )
        atexit.register(self._at_exit)

    @staticmethod
    def _connect(address: str) -> socket.socket:
        try:
            stream = socket.create_connection(parse_address(address), timeout=HELLO_SECONDS)
        except (OSError, ValueError) as error:
            raise ProgramError(f"no rank process of ortflow answers at {address}: {error}") from error
        # create_connection leaves its time-out on the socket.
        stream.settimeout(None)
        # A small message would wait until the one before is acknowledged (Nagle's algorithm).
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return stream

    @property
    def here(self) -> bool:
        """Whether this is the process that made the connection, and not one forked from it."""
        return os.getpid() == self._process

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Queue values for the event log."""
        self._logs.append((step, values))

    def tell(self, message: Message) -> None:
        """Send a message that has no reply, after all that was queued; nothing if the connection is lost."""
        self.flush()
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def request(self, message: Message) -> Message:
        """Send a request and wait for its reply. Raises RunLost, and ProgramError with the reply's error."""
        with self._changed:
            self._number += 1
            number = self._number
            self._replies[number] = None
        self.flush()
        with contextlib.suppress(OSError):  # the thread finds out, and says why
            self._connection.send({**message, "id": number})
        with self._changed:
            while self._replies[number] is None:
                if self.lost is not None:
                    raise RunLost(self.lost)
                self._changed.wait()
            reply = self._replies.pop(number)
        assert reply is not None
        if reply.get("error") is not None:
            raise ProgramError(str(reply["error"]))
        return reply

    def flush(self) -> None:
        """Send what is queued."""
        with self._flushing:
            messages: list[Message] = []
            while self._asked:
                messages.append({"kind": "stop_requested", "reason": self._asked.popleft()})
            while self._logs:
                step, values = self._logs.popleft()
                messages.append({"kind": "log", "step": step, "values": values})
            position = self.position()
            if position != self._sent_position:
                self._sent_position = position
                messages.append({"kind": "step", "step": position[0], "checks": position[1]})
            if messages:
                with contextlib.suppress(OSError):
                    self._connection.send(*messages)

    def _serve(self) -> None:
        try:
            poll = select.poll()  # select() has no descriptors above 1023
            poll.register(self._stream, select.POLLIN)
            if self.signals.pipe != -1:
                poll.register(self.signals.pipe, select.POLLIN)
            while True:
                for descriptor, _ in poll.poll(PERIOD * 1000):
                    if descriptor == self.signals.pipe:
                        self.signals.read()
                    elif not self._receive():
                        self._lose("the rank process of ortflow closed the connection")
                        return
                self.flush()
        except (OSError, WireError) as error:
            self._lose(f"the connection to ortflow's rank process failed: {error}")

    def _receive(self) -> bool:
        messages = self._connection.read()
        for message in messages or ():
            if message["kind"] == "reply":
                with self._changed:
                    if message["id"] in self._replies:
                        self._replies[message["id"]] = message
                    self._changed.notify_all()
            elif message["kind"] == "prepare":
                if message["purpose"] == STOP:
                    self.deadline(message["seconds_left"])
                bound = self._checks.prepare(message["purpose"], message["reason"])
                self._connection.send({"kind": "bound", "round": message["round"], "check": bound})
            elif message["kind"] == "verdict":
                self._checks.settle(message["purpose"], message["check"])
        return messages is not None

    def _lose(self, reason: str) -> None:
        with self._changed:
            self.lost = reason
            self._changed.notify_all()
        self._checks.stop_now(reason)

    def _at_exit(self) -> None:
        if self.here and self.lost is None:
            self.flush()

    def _leave_in_child(self) -> None:
        """In a forked child: the connection stays the parent's. Closing without a shutdown, which both would see."""
        self.lost = "this process was forked from the rank's"
        self._stream.close()
        self.signals.remove_in_child()
        self.signals.release()
