"""Messages between a training program's library (`ortflow.program`) and the rank process that started the program.

One stream connection per rank. A message is one line of JSON, an object with the key `kind`. A request has an `id`;
its reply is a message of kind `reply` with the same `id`, and the key `error` (a sentence) if it failed. Imported by
the program too: standard library only, and nothing that is slow to import.

From the program to the rank process:

| kind | fields | reply |
|---|---|---|
| `hello` | id, token, rank, world_size, pid, version, level (1 or 2), stacks (the signal on which the program writes its stacks, or null) | run, attempt, checkpoints, newest (step or null), newest_path, seconds_left, stop (reason or null), period {steps, seconds}, prove (path or null), profile (from, to, folder, host, attempt; or null) |
| `step` | step, checks: the rank's position; the latest counts | |
| `log` | step, values {name: number or text} | |
| `total` | steps: the declared length | |
| `stop_requested` | reason: a signal reached the program itself | |
| `save_requested` | : from rank 0, the checkpoint period in seconds has passed; begins a round of purpose `save` | |
| `bound` | round, check: the next check that this rank has not begun | |
| `begin_commit` | id, step | path of the temporary folder, when every rank has asked for the same step |
| `end_commit` | id, step, error (text or null) | path of the checkpoint, when it is complete |
| `rejected` | step, reason: the program cannot load this checkpoint and ends | |
| `finished` | : the program has done all it should | |

From the rank process to the program:

| kind | fields |
|---|---|
| `prepare` | round, purpose (`stop` or `save`), reason, seconds_left (until SIGKILL, or null): answer with `bound`, and block at that check until the verdict |
| `verdict` | round, purpose, check: the agreed check, the largest bound of all ranks |
| `bye` | : no more messages follow |

A check is one reading of `should_stop`; every rank counts its own from 0, and `steps` reads it once a step. The next
round begins only after the verdict of the last one. Rounds of purpose `save` are asked for only by rank 0 at level 2.
"""  # noqa: E501

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

VERSION = 1
"""Raised with every change that the other side cannot read; sent in `hello`."""

ADDRESS_VARIABLE = "ORTFLOW_PROGRAM"
"""HOST:PORT of the rank process's server."""
TOKEN_VARIABLE = "ORTFLOW_PROGRAM_TOKEN"

STOP, SAVE = "stop", "save"
"""Purposes of a round."""

MAX_LINE = 1 << 20
"""Bytes of the longest message: a longer one is not of this protocol."""

Message = dict[str, Any]

_ENCODER = json.JSONEncoder(separators=(",", ":"))  # json.dumps makes one for each message
_NUMBER = (int, float)
_OPTIONAL_TEXT = (str, type(None))
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": {"id": (int,), "token": (str,), "rank": (int,), "world_size": (int,), "pid": (int,), "level": (int,),
              "version": (int,)},
    "step": {"step": (int,), "checks": (int,)},
    "log": {"step": (int,), "values": (dict,)},
    "total": {"steps": (int,)},
    "stop_requested": {"reason": (str,)},
    "save_requested": {},
    "bound": {"round": (int,), "check": (int,)},
    "begin_commit": {"id": (int,), "step": (int,)},
    "end_commit": {"id": (int,), "step": (int,), "error": _OPTIONAL_TEXT},
    "rejected": {"step": (int,), "reason": (str,)},
    "finished": {},
    "reply": {"id": (int,)},
    "prepare": {"round": (int,), "purpose": (str,), "reason": (str,), "seconds_left": (*_NUMBER, type(None))},
    "verdict": {"round": (int,), "purpose": (str,), "check": (int,)},
    "bye": {},
}  # fmt: skip
"""Fields that a message of each kind has at least, with their types."""


class WireError(Exception):
    """The other side sent something that is not of this protocol."""


def encode(message: Message) -> bytes:
    """Return the line of a message; raise WireError if it is too long, TypeError if it is not plain data."""
    line = _ENCODER.encode(message).encode() + b"\n"
    if len(line) > MAX_LINE:
        raise WireError(f"a message of kind {message.get('kind')!r} has {len(line)} bytes; at most {MAX_LINE} are sent")
    return line


def decode(line: bytes) -> Message:
    """Return the message of a line, with the fields of its kind; raise WireError otherwise."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a line of JSON: {line[:80]!r}") from error
    kind = message.get("kind") if isinstance(message, dict) else None
    fields = FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise WireError(f"not a message of this protocol: {line[:80]!r}")
    for name, types in fields.items():
        value = message.get(name, Ellipsis)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise WireError(f"a message of kind {kind!r} has no valid {name!r}: {line[:80]!r}")
    return dict(message)


class Lines:
    """Messages of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are complete with these bytes; raise WireError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise WireError(f"a line of more than {MAX_LINE} bytes")
        for line in lines:
            yield decode(line)


class Connection:
    """Whole messages over a connected stream socket; sending is safe from several threads, receiving from one."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._lines = stream, Lines()
        self._ready: list[Message] = []
        self._sending = threading.Lock()

    def send(self, *messages: Message) -> None:
        """Send messages in one piece; raise OSError if the connection is closed."""
        data = b"".join(map(encode, messages))
        with self._sending:
            self._stream.sendall(data)

    def receive(self) -> Message | None:
        """Wait for the next message; None at the end of the connection. Raise WireError or OSError."""
        while not self._ready:
            data = self._stream.recv(1 << 16)
            if not data:
                return None
            self._ready.extend(self._lines.feed(data))
        return self._ready.pop(0)

    def read(self) -> list[Message] | None:
        """Return the messages that are complete with the next bytes, for which it waits; None at the end.

        For a caller that polls the descriptor: `receive` may leave messages behind. Raise WireError or OSError.
        """
        data = self._stream.recv(1 << 16)
        return list(self._lines.feed(data)) if data else None

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._stream.fileno()

    def close(self) -> None:
        """End the connection: a thread that waits in `receive` returns."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; raise ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"not HOST:PORT: {text!r}")
    return host, int(port)
