"""The rank process's side of `ortflow.program`: what the program's library reports, and what it is answered."""

from __future__ import annotations

import os
from collections.abc import Callable

from ortflow.workflow.program.channel import Message
from ortflow.workflow.program.context import ProgramContext
from ortflow.workflow.program.serve import Client, Server
from ortflow.workflow.run.profile_records import folder_of
from ortflow.workflow.steps.save_period import save_period


class Library:
    """All libraries that have connected: one, or several where another launcher starts the processes of a node.

    Parameters
    ----------
    tell
        Sends a message to the coordinator.
    ask
        Called with the reason when the program itself was asked to stop.
    stopping
        Why the run stops, and the seconds that are left; None if that is unknown.
    """

    def __init__(
        self,
        context: ProgramContext,
        server: Server,
        tell: Callable[[Message], None],
        ask: Callable[[str], None],
        stopping: Callable[[], tuple[str | None, float | None]],
    ) -> None:
        self._context, self._server = context, server
        self._tell, self._ask, self._stopping = tell, ask, stopping
        self.stepped = False
        """Whether a step was reported in this attempt."""
        self.moved = True
        """Whether anything was reported since the last heartbeat."""
        self.finished = False
        self.total: int | None = None
        self.rejected: str | None = None
        """Why the program cannot load its checkpoint."""

    @property
    def connected(self) -> bool:
        """Whether the program uses `ortflow.program`."""
        return bool(self._server.members)

    def serve(self) -> None:
        """Read what has arrived."""
        for client, message in self._server.receive():
            assert client.rank is not None
            if message is None:
                self._tell({"kind": "left", "member": client.rank})
            else:
                self._hear(client, message)

    def send(self, message: Message) -> None:
        """Send a decision to all."""
        extra_fields = {"seconds_left": self._stopping()[1]} if message["kind"] == "prepare" else {}
        for client in self._server.members:
            client.send({**message, **extra_fields})

    def answer(self, kind: str, message: Message) -> None:
        """Answer the requests of this kind for the message's step."""
        for client in self._server.members:
            number = client.waiting.pop((kind, message["step"]), None)
            if number is not None:
                error = {"error": message["error"]} if message["error"] is not None else {}
                client.send({"kind": "reply", "id": number, "path": message["path"], **error})

    def _hear(self, client: Client, message: Message) -> None:
        kind, context, member = message["kind"], self._context, client.rank
        if kind == "hello":
            client.send(self._welcome(message))
            self._tell({"kind": "member", "member": member, "size": message["world_size"]})
        elif kind == "step":
            client.step, client.checks = message["step"], message["checks"]
            self.stepped = self.moved = True
            context.progress.step = max(context.progress.step, message["step"])
        elif kind == "log" and member == 0:
            self.stepped = self.moved = True
            context.progress.step = max(context.progress.step, message["step"])
            context.report.log(message["step"], message["values"], self.total)
        elif kind == "total":
            self.total = message["steps"]
            if member == 0:
                context.report.total(message["steps"])
        elif kind == "finished":
            self.finished = True
        elif kind == "stop_requested":
            self._ask(str(message["reason"]))
        elif kind in ("save_requested", "bound"):
            self._tell({**message, "member": member})
        elif kind in ("begin_commit", "end_commit"):
            client.waiting[kind, message["step"]] = message["id"]
            self.moved = True
            self._tell({**message, "kind": kind.partition("_")[0], "member": member})
        elif kind == "rejected":
            self.rejected = f"cannot load the checkpoint of step {message['step']}: {message['reason']}"

    def _window(self) -> Message | None:
        """The steps that the program records, and where; None if it records none."""
        context = self._context
        window = context.spec.monitor.profile
        if window is None:
            return None
        folder = folder_of(context.run_dir.root, context.attempt)
        place = {"folder": str(folder), "host": context.place.host, "attempt": context.attempt}
        return {"from": window.first, "to": window.to, **place}

    def _welcome(self, hello: Message) -> Message:
        context = self._context
        section, path = context.spec.checkpoint, context.newest_path
        reason, seconds_left = self._stopping()
        return {
            "kind": "reply", "id": hello["id"], "run": context.spec.name, "attempt": context.attempt,
            "checkpoints": str(context.store.path), "newest": context.newest,
            "newest_path": None if path is None else str(path), "seconds_left": seconds_left,
            "stop": reason, "period": {"steps": section.every_steps, "seconds": save_period(section, 0.0)},
            "profile": self._window(),
            "prove": os.environ.get("ORTFLOW_PROVE"), "seed": context.spec.seed,
        }  # fmt: skip
