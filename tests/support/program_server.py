"""A small rank process for tests of `ortflow.program`: one server for all ranks, real sockets, the real protocol."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waits import PATIENCE

from ortflow.workflow.program.wire import ADDRESS_VARIABLE, TOKEN_VARIABLE, Connection, Message

TOKEN = "a-token"


class ProgramServer:
    """Serves `world_size` ranks; `folder` holds their checkpoints. Use it as a context manager."""

    def __init__(self, folder: Path, world_size: int = 1, attempt: int = 0, **hello: Any) -> None:
        self.folder, self.world_size = folder, world_size
        self.hello = {"run": "test", "attempt": attempt, "checkpoints": str(folder), "seconds_left": None, "stop": None,
                      "period": {"steps": None, "seconds": None}, "prove": None, **hello}  # fmt: skip
        self.messages: list[tuple[int, Message]] = []
        self.ranks: dict[int, Connection] = {}
        self.changed = threading.Condition()
        self._greeted: set[int] = set()
        self._bounds: dict[int, int] = {}
        self._round = 0
        self._streams: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._commits: dict[tuple[str, int], dict[int, Message]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])

    def __enter__(self) -> ProgramServer:
        self._begin(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self.changed:
            for stream in self._streams:
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def environment(self, rank: int = 0) -> dict[str, str]:
        """The variables of a rank's program."""
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world_size, "OMP_NUM_THREADS": 1}
        own = {ADDRESS_VARIABLE: self.address, TOKEN_VARIABLE: TOKEN, "MASTER_ADDR": "127.0.0.1"}
        return {**os.environ, **own, **{name: str(number) for name, number in names.items()}}

    def start(self, script: Path, *arguments: str, **more: str) -> list[subprocess.Popen[str]]:
        """Start the program on every rank, when the server has seen the end of those before."""
        self.wait(lambda server: not server.ranks)
        self._greeted.clear()
        port = str(free_port())
        return [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={**self.environment(rank), "MASTER_PORT": port, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=script.parent,
            )
            for rank in range(self.world_size)
        ]

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        return max((p for p in self.folder.glob("step-*") if (p / "COMMITTED").exists()), default=None)

    def steps(self, rank: int = 0) -> list[int]:
        """The positions that a rank has reported."""
        return [message["step"] for sender, message in self.messages if sender == rank and message["kind"] == "step"]

    def of_kind(self, kind: str) -> list[Message]:
        """All messages of a kind, of any rank."""
        return [message for _, message in list(self.messages) if message["kind"] == kind]

    def wait(self, condition: Any, seconds: float = PATIENCE) -> None:
        """Wait until a function of this server is true."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), seconds), self.messages[-5:]

    def ask(self, reason: str, purpose: str = "stop", seconds: float | None = 30.0) -> int:
        """Hold a round; returns the agreed check."""
        with self.changed:
            self._round += 1
            self._bounds = {}
            ranks = dict(self.ranks)
        prepare = {
            "kind": "prepare",
            "round": self._round,
            "purpose": purpose,
            "reason": reason,
            "seconds_left": seconds,
        }
        for connection in ranks.values():
            with contextlib.suppress(OSError):  # the rank has ended
                connection.send(prepare)
        self.wait(lambda server: set(server._bounds) >= set(ranks) & set(server.ranks))
        check = max(self._bounds.values(), default=0)
        for connection in ranks.values():
            with contextlib.suppress(OSError):
                connection.send({"kind": "verdict", "round": self._round, "purpose": purpose, "check": check})
        return check

    def _accept(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            with self.changed:
                self._streams.append(stream)
            self._begin(lambda stream=stream: self._serve(stream))

    def _begin(self, target: Callable[[], object]) -> None:
        thread = threading.Thread(target=target, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, stream: socket.socket) -> None:
        connection = Connection(stream)
        rank = -1
        try:
            while (message := connection.receive()) is not None:
                if message["kind"] == "hello":
                    rank = message["rank"]
                with self.changed:
                    self.messages.append((rank, message))
                    self._handle(rank, message, connection)
                    self.changed.notify_all()
        except OSError:
            pass
        with self.changed:
            if self.ranks.get(rank) is connection:
                del self.ranks[rank]
            for key in list(self._commits):
                self._settle(key, f"rank {rank} has ended")
            self._streams.remove(stream)
            stream.close()
            self.changed.notify_all()

    def _handle(self, rank: int, message: Message, connection: Connection) -> None:
        kind = message["kind"]
        if kind == "hello":
            reply: Message = {"kind": "reply", "id": message["id"]}
            if message["token"] != TOKEN:
                connection.send({**reply, "error": "the token is not this run's"})
                return
            self.ranks[rank] = connection
            self._greeted.add(rank)
            newest = self.newest()
            connection.send({**reply, **self.hello, "newest": newest and int(newest.name[5:]),
                             "newest_path": newest and str(newest)})  # fmt: skip
        elif kind == "bound":
            self._bounds[rank] = message["check"]
        elif kind in ("stop_requested", "save_requested"):
            purpose = kind.removesuffix("_requested")
            self._begin(lambda: self.ask(message.get("reason", ""), purpose))
        elif kind in ("begin_commit", "end_commit"):
            key = (kind, message["step"])
            self._commits.setdefault(key, {})[rank] = message
            gone = self._greeted - set(self.ranks)
            if gone:
                self._settle(key, f"rank {min(gone)} has ended")
            elif len(self._commits[key]) == self.world_size:
                self._settle(key, None)

    def _settle(self, key: tuple[str, int], error: str | None) -> None:
        kind, step = key
        requests = self._commits.pop(key)
        temporary, final = self.folder / f"tmp-{step}", self.folder / f"step-{step:08d}"
        error = error or next((str(m["error"]) for m in requests.values() if m.get("error")), None)
        if kind == "begin_commit":
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        elif error is None:
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            (final / "COMMITTED").touch()
        path = temporary if kind == "begin_commit" else final
        for rank, request in requests.items():
            if rank in self.ranks:
                reply = {"kind": "reply", "id": request["id"], "path": str(path)}
                self.ranks[rank].send(reply if error is None else {**reply, "error": error})


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
