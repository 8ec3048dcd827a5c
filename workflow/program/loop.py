"""The loop of a rank's process while its program runs: messages, requests to stop, the heartbeat, the end.

One thread: nothing that takes long is done here. `library` talks to the program, `lead` decides on rank 0.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading
import time
from collections import deque

from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED
from ortflow.workflow.program.channel import Lost, Message
from ortflow.workflow.program.child import Child
from ortflow.workflow.program.commit import Hashing
from ortflow.workflow.program.context import ProgramContext
from ortflow.workflow.program.coordinator import Out
from ortflow.workflow.program.deadline import job_end, stop_limit
from ortflow.workflow.program.endings import Ending, Known, ending_of
from ortflow.workflow.program.lead import Lead
from ortflow.workflow.program.library import Library
from ortflow.workflow.program.output import Output
from ortflow.workflow.program.serve import Server
from ortflow.workflow.program.stacks import write_stacks
from ortflow.workflow.program.usage import FIRST, PERIOD, ProgramUsage
from ortflow.workflow.run.events import warn
from ortflow.workflow.run.hang import SHARE
from ortflow.workflow.system.oom import oom_kills
from ortflow.workflow.system.threads import start_or_call

TICK = 0.03
"""Longest wait between two looks at the program and the flag of requests, in seconds."""
OTHERS = 10.0
"""Seconds that a rank waits for rank 0's word after its program has ended because all are to end."""


class Loop:
    """One rank's program from its start to its end."""

    def __init__(
        self, context: ProgramContext, selector: selectors.BaseSelector, server: Server, child: Child | None
    ) -> None:
        self._context, self._selector, self._server, self._child = context, selector, server, child
        self._clock = context.clock
        self._lead = Lead(context) if context.leads else None
        self._library = Library(context, server, self._tell, self._ask, lambda: (self._asked, self._seconds_left()))
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
        self._killed_in: float | None = None
        """Seconds from the request to the scheduler's kill, if they are known."""
        self._killed: str | None = None
        self._failed: Message | None = None
        """Another rank's failure, because of which this one ends."""
        self._started_at, self._ended_at = self._clock.monotonic(), 0.0
        self._over = False
        self._ending: Ending | None = None
        self._ooms = oom_kills()
        self._output = Output(context.run_dir.log(context.attempt, context.place.rank))
        self._beat_at = 0.0
        hung = context.spec.restart.hung_seconds
        self._patience = None if hung is None else SHARE * hung
        """Seconds without a sign of rank 0's program after which all write their stacks."""
        self._moved_at, self._asked_for_stacks = self._started_at, False
        self._stacks: threading.Thread | None = None
        self._usage = ProgramUsage(child.pid) if child is not None else None
        self._measures: threading.Thread | None = None
        self._measure_at, self._measured_beat = self._started_at + FIRST, 0.0

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
            if self._measures is not None:
                self._measures.join(2.0)  # a driver may hang
            self._hashing.close()
        assert self._ending is not None
        if self._lead is not None and self._ending.code == EXIT_FAILURE:
            self._lead.commits.failed(self._ending.sentence)
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
        if len(ready) > sum(isinstance(source, int) for source in ready):
            self._library.serve()
        self._server.flush()
        for message in self._hashing.results():
            self._tell(message)
        if self._ending is None and self._child is not None:
            status = self._child.poll()
            if status is not None:
                self._end(status)
        self._stops()
        self._measure()
        if self._lead is not None:
            while self._own:
                self._send(self._lead.receive(0, self._own.popleft()))
            self._send(self._lead.turn())
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
        if self._lead is not None:
            self._send(self._lead.receive(rank, message))
        else:
            self._take(message)

    def _lose(self, rank: int) -> None:
        """The process of another rank is gone."""
        peer = self._peers.pop(rank)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.stream)
        peer.close()
        if self._lead is not None:
            self._send(self._lead.lost(rank))
        else:
            self._take({"kind": "failed", "rank": 0, "sentence": "the process of rank 0 has ended"})
            self._over = True

    def _tell(self, message: Message) -> None:
        """Send a message to the coordinator."""
        if self._lead is not None:
            self._own.append(message)
        elif 0 in self._peers:
            try:
                self._peers[0].send(message)
            except Lost:
                self._lose(0)

    def _send(self, messages: list[Out]) -> None:
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
        kind = message["kind"]
        if kind == "stop":
            self._stop(str(message["reason"]), message["seconds"])
        elif kind in ("prepare", "verdict"):
            self._library.send(message)
        elif kind == "begun":
            self._library.answer("begin_commit", message)
        elif kind == "committed":
            if message["error"] is None:
                self._context.newest, self._library.moved = message["step"], True
            self._library.answer("end_commit", message)
        elif kind == "hash":
            self._hashing.start(message)
        elif kind == "failed":
            self._fail(message)
        elif kind == "stacks":
            if self._ending is None and self._child is not None:
                context = self._context
                self._stacks = write_stacks(
                    lambda rank: context.run_dir.log(context.attempt, rank), context.place.rank,
                    self._server.members, self._child.pid,
                )  # fmt: skip
        elif kind == "over":
            self._over = True
            if self._child is None:
                sentence = f"the program of rank {self._context.place.rank} stopped with the others"
                self._ending = Ending(message["code"], sentence)
        else:
            assert self._lead is not None
            self._send(self._lead.carry_out(message, [0, *self._peers]))

    # Requests to stop

    def _ask(self, reason: str) -> None:
        """A stop is wanted here: all ranks are to know."""
        if not self._sent_ask:
            self._sent_ask = True
            self._tell({"kind": "asked", "reason": reason})

    def _stop(self, reason: str, seconds: float | None) -> None:
        """All ranks stop: a program without a library gets a signal, the others agree on a step."""
        if self._asked is not None:
            return
        self._asked, self._asked_at = reason, self._clock.monotonic()
        self._killed_in = seconds
        self._context.events.write("stop_requested", reason=reason)
        if not self._library.connected and self._child is not None:
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
        """Seconds until the program is killed, if that is known."""
        candidates = [job_end(os.environ, time.time())]
        if self._asked is not None:
            since = self._clock.monotonic() - self._asked_at
            candidates = [self._limit - since, candidates[0] if self._killed_in is None else self._killed_in - since]
        limits = [seconds for seconds in candidates if seconds is not None]
        return round(max(0.0, min(limits)), 3) if limits else None

    def _measure(self) -> None:
        """Record the memory of the program, beside this loop, if rank 0's has moved since the last time.

        The launcher takes every event for a sign that ranks move: of programs that hang there must be none.
        """
        now = self._clock.monotonic()
        if self._usage is None or self._ending is not None or now < self._measure_at:
            return
        self._measure_at, usage = now + PERIOD, self._usage
        try:
            beat = self._context.run_dir.heartbeat.stat().st_mtime
        except OSError:
            return
        if beat != self._measured_beat and (self._measures is None or not self._measures.is_alive()):
            self._measured_beat = beat
            self._measures = start_or_call("usage", lambda: self._record_usage(usage))

    def _record_usage(self, usage: ProgramUsage) -> None:
        with contextlib.suppress(OSError):  # a record alone must not end a run
            if sizes := usage.measure():
                self._context.events.write("usage", step=self._context.progress.step, **sizes)

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
        self._library.serve()  # what it sent last
        context, library = self._context, self._library
        assert self._child is not None
        leftovers = self._child.end_leftovers()
        if leftovers:
            many = "process" if leftovers == 1 else "processes"
            warn(context.events, f"the program of rank {context.place.rank} left {leftovers} {many} behind: killed")
        facts = Known(
            status, self._asked, self._killed, stepped=library.stepped, finished=library.finished,
            step=context.progress.step, total=library.total, tail=self._output.tail(), rejected=library.rejected,
            out_of_memory=(oom_kills() or 0) > (self._ooms or 0),
            seconds=self._clock.monotonic() - self._started_at,
        )  # fmt: skip
        ending = ending_of(facts, f"rank {context.place.rank}")
        if self._failed is not None and self._failed["rank"] != context.place.rank:
            sentence = f"ended because {self._failed['sentence']}"
            ending = Ending(EXIT_FAILURE, sentence, communication=True)
        self._ending, self._ended_at = ending, self._clock.monotonic()
        self._tell({"kind": "ended", **vars(ending)})

    def _beat(self) -> None:
        """Rank 0: touch the heartbeat if the program has moved: its log has grown, or it has reported a step."""
        now = self._clock.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + 1.0
        grew = self._output.grew()
        if self._stacks is not None:
            # Stacks that are written here are no sign that the program moves.
            grew, self._stacks = False, self._stacks if self._stacks.is_alive() else None
        if grew or self._library.moved:
            self._library.moved = self._asked_for_stacks = False
            self._moved_at = now
            with contextlib.suppress(OSError):
                self._context.run_dir.heartbeat.touch()
        elif self._patience is not None and not self._asked_for_stacks and now > self._moved_at + self._patience:
            self._asked_for_stacks = True
            self._send([(None, {"kind": "stacks"})])
