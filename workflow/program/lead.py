"""Rank 0's part in the loop: the coordinator's decisions, and those about files carried out."""

from __future__ import annotations

from collections.abc import Collection

from ortflow.workflow.program.channel import Message
from ortflow.workflow.program.commit import Commits
from ortflow.workflow.program.context import ProgramContext
from ortflow.workflow.program.coordinator import Coordinator, Out
from ortflow.workflow.program.deadline import ask_slurm


class Lead:
    """Each call returns the messages to send."""

    def __init__(self, context: ProgramContext) -> None:
        self._clock = context.clock
        self._coordinator = Coordinator(context.place.world_size)
        self.commits = Commits(context)

    def receive(self, rank: int, message: Message) -> list[Out]:
        """A message of a rank."""
        messages = self._coordinator.receive(rank, message, self._clock.monotonic())
        if any(out["kind"] == "stop" for _, out in messages):
            # One rank asks, for all.
            seconds = ask_slurm(str(message["reason"]))
            messages = [(to, {**out, "seconds": seconds} if out["kind"] == "stop" else out) for to, out in messages]
        return messages

    def lost(self, rank: int) -> list[Out]:
        """The process of a rank is gone."""
        return self._coordinator.lost(rank, self._clock.monotonic())

    def turn(self) -> list[Out]:
        """Time has passed, and work on files may have ended."""
        messages = self._coordinator.tick(self._clock.monotonic())
        for path, error in self.commits.results():
            messages += self._coordinator.closed(path, error)
        return messages

    def carry_out(self, message: Message, ranks: Collection[int]) -> list[Out]:
        """What the coordinator wants to be done with files; `ranks` can hash some."""
        kind, step = message["kind"], message["step"]
        if kind == "make":
            return self._coordinator.made(step, *self.commits.make(step))
        if kind == "list":
            shares, path, error = self.commits.shares(step, sorted(ranks))
            if error is None:
                return self._coordinator.listed(shares, path)
            self.commits.abandon(step, error)
            return self._coordinator.closed(None, error)
        if kind == "finish":
            self.commits.finish(step, message["records"])
        elif kind == "abandon":
            self.commits.abandon(step, message["reason"])
        else:
            raise AssertionError(f"no work on files is called {kind!r}")
        return []
