"""The loop of a rank's process while its program runs: messages, requests to stop, the heartbeat, the end.

One thread: nothing that takes long is done here, except in the background (`Background`). On rank 0 it also carries out
what the coordinator decides.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections import deque

from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.events import warn
from ortflow.workflow.oom import oom_kills
from ortflow.workflow.program.channel import Lost, Message
from ortflow.workflow.program.child import Child
from ortflow.workflow.program.commit import Commits, Hashing
from ortflow.workflow.program.context import ProgramContext
from ortflow.workflow.program.coordinator import Coordinator
from ortflow.workflow.program.endings import TAIL, Ending, Known, ending_of
from ortflow.workflow.program.serve import Client, Server
from ortflow.workflow.spec.run import ProgramRunSpec
from ortflow.workflow.steps.save_period import save_period

TICK = 0.03
"""Longest wait between two looks at the program and the flag of requests, in seconds."""
PODS_SHARE = 0.75
"""Share of the pods' grace that a program has to stop."""
OTHERS = 10.0
"""Seconds that a rank waits for rank 0's word after its program has ended because all are to end."""


class Loop:
    """One rank's program from its start to its end."""

    def __init__(
        self, context: ProgramContext, selector: selectors.BaseSelector, server: Server, child: Child | None
    ) -> None:
        self._context, self._selector, self._server, self._child = context, selector, server, child
        self._clock = context.clock
        self._coordinator = Coordinator(context.place.world_size) if context.leads else None
        self._commits = Commits(context) if context.leads else None
        self._hashing = Hashing()
        self._own: deque[Message] = deque()
        """Messages of this rank to the coordinator here."""
        self._peers = dict(context.peers)
        for rank, peer in self._peers.items():
            selector.register(peer.stream, selectors.EVENT_READ, rank)
        self._early = [(rank, message) for rank, peer in self._peers.items() for message in peer.pending()]
        """Messages that came with those of the start."""
        self._limit = stop_limit(context.spec, os.environ.get("ORTFLOW_LAUNCHER", ""))
        self._asked: str | None = None
        self._sent_ask = False
        self._asked_at = 0.0
        self._killed: str | None = None
        self._failed: Message | None = None
        """Another rank's failure, because of which this one ends."""
        self._started_at, self._ended_at = self._clock.monotonic(), 0.0
        self._over = False
        self._ending: Ending | None = None
        self._finished, self._stepped = False, False
        self._total: int | None = None
        self._rejected: str | None = None
        self._ooms = oom_kills()
        self._log = context.run_dir.log(context.attempt, context.place.rank)
        self._log_start = self._log_size()
        self._beat_at, self._log_seen, self._moved = 0.0, self._log_start, True

    def run(self) -> Ending:
        """Wait for the end of all programs; returns how this one has ended."""
        if self._child is None:
            # A launcher on this node starts this rank's program, and the first rank there waits for it.
            self._tell({"kind": "ended", **vars(Ending(EXIT_DONE)), "idle": True})
        try:
            while not (self._ending is not None and self._over):
                self._turn()
        finally:
            if self._child is not None:
                self._child.kill()
            self._hashing.close()
        assert self._ending is not None
        return self._ending

    def _turn(self) -> None:
        early, self._early = self._early, []
        for rank, message in early:
            self._receive(rank, message)
        # Before a program has connected nothing is ready, and afterwards only what has arrived is read.
        ready = [key.data for key, _ in self._selector.select(TICK)]
        for rank in ready:
            if isinstance(rank, int) and rank in self._peers:
                self._read_peer(rank)
        if len(ready) > sum(isinstance(each, int) for each in ready):
            self._serve()
        self._server.flush()
        for message in self._hashing.results():
            self._tell(message)
        if self._ending is None and self._child is not None:
            status = self._child.poll()
            if status is not None:
                self._end(status)
        self._stops()
        if self._coordinator is not None:
            self._lead()
            self._beat()

    # Messages

    def _read_peer(self, rank: int) -> None:
        peer = self._peers[rank]
        try:
            messages = peer.read()
        except Lost:
            self._lose(rank)
            return
        for message in messages:
            self._receive(rank, message)

    def _receive(self, rank: int, message: Message) -> None:
        if self._coordinator is not None:
            self._send(self._coordinator.receive(rank, message, self._clock.monotonic()))
        else:
            self._take(message)

    def _lose(self, rank: int) -> None:
        """The process of another rank is gone."""
        peer = self._peers.pop(rank)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.stream)
        peer.close()
        if self._coordinator is not None:
            self._send(self._coordinator.lost(rank, self._clock.monotonic()))
        else:
            self._take({"kind": "failed", "rank": 0, "sentence": "the process of rank 0 has ended"})
            self._over = True

    def _tell(self, message: Message) -> None:
        """Send a message to the coordinator."""
        if self._coordinator is not None:
            self._own.append(message)
        elif 0 in self._peers:
            try:
                self._peers[0].send(message)
            except Lost:
                self._lose(0)

    def _lead(self) -> None:
        """Rank 0: its own messages, results about files, and time."""
        assert self._coordinator is not None
        assert self._commits is not None
        now = self._clock.monotonic()
        while self._own:
            self._send(self._coordinator.receive(0, self._own.popleft(), now))
        self._send(self._coordinator.tick(now))
        for closed in self._commits.results():
            self._send(self._coordinator.closed(*closed))

    def _send(self, messages: list[tuple[int | None, Message]]) -> None:
        """Rank 0: deliver what the coordinator has decided."""
        for target, message in messages:
            for rank, peer in [*self._peers.items()]:
                if target in (None, rank):
                    try:
                        peer.send(message)
                    except Lost:
                        self._lose(rank)
            if target in (None, 0):
                self._take(message)

    def _take(self, message: Message) -> None:
        """A decision for this rank."""
        kind, step = message["kind"], message.get("step")
        if kind == "stop":
            self._stop(str(message["reason"]))
        elif kind in ("prepare", "verdict"):
            more = {"seconds_left": self._seconds_left()} if kind == "prepare" else {}
            self._to_members({**message, **more})
        elif kind == "begun":
            self._answer("begin_commit", step, message)
        elif kind == "committed":
            if message["error"] is None:
                self._context.newest, self._moved = step, True
            self._answer("end_commit", step, message)
        elif kind == "hash":
            self._hashing.start(message)
        elif kind == "failed":
            self._fail(message)
        elif kind == "over":
            self._over = True
            if self._child is None:
                sentence = f"the program of rank {self._context.place.rank} stopped with the others"
                self._ending = Ending(message["code"], sentence)
        else:
            self._files(message)

    def _files(self, message: Message) -> None:
        """Rank 0: what the coordinator wants to be done with files."""
        assert self._coordinator is not None
        assert self._commits is not None
        kind, step = message["kind"], message["step"]
        if kind == "make":
            self._send(self._coordinator.made(step, *self._commits.make(step)))
        elif kind == "list":
            shares, path, error = self._commits.shares(step, [0, *self._peers])
            if error is not None:
                self._commits.abandon(step, error)
                self._send(self._coordinator.closed(None, error))
            else:
                self._send(self._coordinator.listed(shares, path))
        elif kind == "finish":
            self._commits.finish(step, message["records"])
        elif kind == "abandon":
            self._commits.abandon(step, message["reason"])

    # The program's library

    def _serve(self) -> None:
        for client, message in self._server.receive():
            assert client.rank is not None
            if message is None:
                self._tell({"kind": "left", "member": client.rank})
            else:
                self._hear(client, message)

    def _hear(self, client: Client, message: Message) -> None:
        """A message of the program's library."""
        kind, context, member = message["kind"], self._context, client.rank
        if kind == "hello":
            client.send(self._welcome(message))
            self._tell({"kind": "member", "member": member, "size": message["world_size"]})
        elif kind == "step":
            client.step, client.checks = message["step"], message["checks"]
            self._stepped = self._moved = True
            context.progress.step = max(context.progress.step, message["step"])
        elif kind == "log" and member == 0:
            self._stepped = self._moved = True
            context.progress.step = max(context.progress.step, message["step"])
            context.report.log(message["step"], message["values"], self._total)
        elif kind == "total":
            self._total = message["steps"]
            if member == 0:
                context.report.total(message["steps"])
        elif kind == "finished":
            self._finished = True
        elif kind == "stop_requested":
            self._ask(str(message["reason"]))
        elif kind in ("save_requested", "bound"):
            self._tell({**message, "member": member})
        elif kind in ("begin_commit", "end_commit"):
            client.waiting[kind, message["step"]] = message["id"]
            self._moved = True
            self._tell({**message, "kind": kind.partition("_")[0], "member": member})
        elif kind == "rejected":
            self._rejected = f"cannot load the checkpoint of step {message['step']}: {message['reason']}"

    def _welcome(self, hello: Message) -> Message:
        context = self._context
        section = context.spec.checkpoint
        path = context.newest_path
        return {
            "kind": "reply", "id": hello["id"], "run": context.spec.name, "attempt": context.attempt,
            "checkpoints": str(context.store.path), "newest": context.newest,
            "newest_path": None if path is None else str(path), "seconds_left": self._seconds_left(),
            "stop": self._asked, "period": {"steps": section.every_steps, "seconds": save_period(section, 0.0)},
            "prove": os.environ.get("ORTFLOW_PROVE"), "seed": context.spec.seed,
        }  # fmt: skip

    def _to_members(self, message: Message) -> None:
        for client in self._server.members:
            client.send(message)

    def _answer(self, kind: str, step: int | None, message: Message) -> None:
        for client in self._server.members:
            number = client.waiting.pop((kind, int(step or 0)), None)
            if number is not None:
                error = {"error": message["error"]} if message["error"] is not None else {}
                client.send({"kind": "reply", "id": number, "path": message["path"], **error})

    # Requests to stop

    def _ask(self, reason: str) -> None:
        """A stop is wanted here: all ranks are to know."""
        if not self._sent_ask:
            self._sent_ask = True
            self._tell({"kind": "asked", "reason": reason})

    def _stop(self, reason: str) -> None:
        """All ranks stop: a program without a library gets a signal, the others agree on a step."""
        if self._asked is not None:
            return
        self._asked, self._asked_at = reason, self._clock.monotonic()
        self._context.events.write("stop_requested", reason=reason)
        if not self._server.members and self._child is not None:
            self._child.ask(signal.SIGTERM)

    def _stops(self) -> None:
        if (reason := self._context.stop.reason) is not None:
            self._ask(reason)
        limit = self._limit
        if self._asked is not None and self._ending is None and self._killed is None and self._child is not None:
            late = self._clock.monotonic() - self._asked_at
            if late > limit:
                self._killed = f"was killed: it did not stop within {limit:g} s of the request (program.stop_seconds)"
                self._child.kill()
        ending = self._ending
        failed = ending is not None and ending.code not in (EXIT_DONE, EXIT_PREEMPTED)
        if failed and self._clock.monotonic() > self._ended_at + OTHERS:
            self._over = True

    def _seconds_left(self) -> float | None:
        """Seconds until SIGKILL, or until the end of the job, if it is known."""
        found = []
        if self._asked is not None:
            found.append(self._limit - (self._clock.monotonic() - self._asked_at))
        if (end := os.environ.get("SLURM_JOB_END_TIME", "")).isdigit():
            found.append(int(end) - time.time())
        return round(max(0.0, min(found)), 3) if found else None

    # The end

    def _fail(self, message: Message) -> None:
        """Another rank has failed, or this one: all end."""
        if self._child is None:
            self._ending = Ending(EXIT_FAILURE, f"ended because {message['sentence']}", communication=True)
        elif self._ending is None and (status := self._child.poll()) is not None:
            self._end(status)  # by itself, before it knew of the other
        self._failed, self._over = message, True
        if self._ending is None and self._child is not None:
            self._child.kill()

    def _end(self, status: int) -> None:
        """The program has ended."""
        self._serve()  # what it sent last
        context = self._context
        assert self._child is not None
        left = self._child.end_leftovers()
        if left:
            many = "process" if left == 1 else "processes"
            warn(context.events, f"the program of rank {context.place.rank} left {left} {many} behind: killed")
        known = Known(
            status, self._asked, self._killed, stepped=self._stepped, finished=self._finished,
            step=context.progress.step, total=self._total, tail=self._tail(), rejected=self._rejected,
            out_of_memory=(oom_kills() or 0) > (self._ooms or 0),
            seconds=self._clock.monotonic() - self._started_at,
        )  # fmt: skip
        ending = ending_of(known, f"rank {context.place.rank}")
        if self._failed is not None and self._failed["rank"] != context.place.rank:
            sentence = f"ended because {self._failed['sentence']}"
            ending = Ending(EXIT_FAILURE, sentence, communication=True)
        self._ending, self._ended_at = ending, self._clock.monotonic()
        self._tell({"kind": "ended", **vars(ending)})

    def _tail(self) -> str:
        """The end of what the program has printed."""
        try:
            with self._log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - TAIL))
                return file.read(TAIL).decode(errors="replace")
        except OSError:
            return ""

    def _log_size(self) -> int:
        try:
            return self._log.stat().st_size
        except OSError:
            return 0

    def _beat(self) -> None:
        """Rank 0: touch the heartbeat if the program has moved: its log has grown, or it has reported a step."""
        now = self._clock.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + 1.0
        size = self._log_size()
        if self._moved or size != self._log_seen:
            self._moved, self._log_seen = False, size
            with contextlib.suppress(OSError):
                self._context.run_dir.heartbeat.touch()


def stop_limit(spec: ProgramRunSpec, launcher: str) -> float:
    """Seconds that a program has to stop; in pods less than their grace, in which the ranks must end too. Pure."""
    if launcher != "kubernetes":
        return spec.program.stop_seconds
    return min(spec.program.stop_seconds, PODS_SHARE * spec.backends.kubernetes.grace_seconds)
