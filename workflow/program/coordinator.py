"""What rank 0's process decides for all ranks: rounds of the agreement, checkpoints, and the end. Pure.

Every rank process sends it messages, rank 0's own too; each call returns the messages to send. Those for rank 0 alone
(`make`, `list`, `finish`, `abandon`) are about files, which `ortflow.workflow.program.commit` handles.

| from a rank | fields |
|---|---|
| `member` | member, size: a program's library has connected |
| `left` | member: its connection has ended |
| `asked` | reason: a stop is wanted |
| `save_requested` | |
| `bound` | member, round, check |
| `begin`, `end` | member, step; end: error |
| `hashed` | step, records or error |
| `ended` | code, sentence, communication: the rank's program has ended |

| to a rank | fields |
|---|---|
| `stop` | reason; `lead` adds the seconds until the scheduler kills the job, or None |
| `prepare`, `verdict` | round, purpose, reason or check |
| `begun`, `committed` | step, path or error |
| `hash` | step, path, files |
| `failed` | rank, sentence: kill the program and end |
| `over` | code: every program has ended, one with 75 if any was stopped |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ortflow.workflow.errors import EXIT_DONE, EXIT_PREEMPTED
from ortflow.workflow.program.agreement import Agreement, Prepare, Verdict
from ortflow.workflow.program.channel import Message
from ortflow.workflow.program.wire import SAVE, STOP

Out = tuple[int | None, Message]
"""A message and the rank that it is for; None for all."""
SETTLE = 1.0
"""Seconds to wait for the cause, after a program has failed that had lost the connection to another."""
ASK_SECONDS = 300.0
"""Seconds in which every rank must ask for a checkpoint after the first has."""


@dataclass
class Commit:
    """A checkpoint that is being made."""

    step: int
    begun: float
    requesters: set[int] = field(default_factory=set)
    """Members that have asked for the folder."""
    has_folder: bool = False
    """The folder exists, and members write."""
    ended: dict[int, str | None] = field(default_factory=dict)
    """Members that have written, with their error."""
    hashing: set[int] = field(default_factory=set)
    """Ranks whose hashes are missing."""
    records: list[Mapping[str, Any]] = field(default_factory=list)
    closing: bool = False
    """All is written; files are listed, hashed and committed."""


class Coordinator:
    """The state of all ranks of an attempt."""

    def __init__(self, ranks: int) -> None:
        self.agreement = Agreement()
        self.members: dict[int, int] = {}
        """Connected programs by their own rank, and the rank process of each."""
        self.ends: dict[int, Message] = {}
        """How the program of each rank has ended."""
        self.commit: Commit | None = None
        self.stop_reason: str | None = None
        self.failed: Message | None = None
        """The failure because of which all ranks end, once they know of it."""
        self._cause: tuple[int, Message, float] | None = None
        """The most likely cause so far, and when the ranks are told."""
        self._ranks = ranks
        self._seen: set[int] = set()
        self._size = ranks

    def receive(self, rank: int, message: Message, now: float) -> list[Out]:
        """Act on a message of a rank process; `now` is by a monotonic clock."""
        kind = message["kind"]
        if kind == "member":
            self.members[message["member"]] = rank
            self._seen.add(message["member"])
            self._size = max(self._ranks, int(message["size"]))
            return self._told(self.agreement.joined(self.members))
        if kind == "left":
            return self._left(message["member"], now)
        if kind == "asked":
            return self._asked(str(message["reason"]))
        if kind == "save_requested":
            return self._told(self.agreement.ask(SAVE, "the checkpoint period", self.members))
        if kind == "bound":
            return self._told(self.agreement.bound(message["member"], message["round"], message["check"], self.members))
        if kind == "begin":
            return self._begin(message["member"], message["step"], now)
        if kind == "end":
            return self._end(message["member"], message["step"], message["error"])
        if kind == "hashed":
            return self._hashed(rank, message)
        if kind == "ended":
            return self._ended(rank, message, now)
        raise AssertionError(f"no message is called {kind!r}")

    def lost(self, rank: int, now: float) -> list[Out]:
        """The process of a rank is gone; if its program had not ended, all end."""
        messages: list[Out] = []
        for member in [member for member, its in self.members.items() if its == rank]:
            messages += self._left(member, now)
        if rank not in self.ends:
            sentence = f"the process of rank {rank} has ended"
            messages += self._fail(rank, {"code": 1, "sentence": sentence, "communication": False}, now)
        return messages

    def tick(self, now: float) -> list[Out]:
        """Tell the ranks of a failure; give up a checkpoint that not all ranks have asked for."""
        if self._cause is not None and self.failed is None and now >= self._cause[2]:
            rank, message, _ = self._cause
            self.failed = {"kind": "failed", "rank": rank, "sentence": message["sentence"]}
            return [(None, self.failed)]
        commit = self.commit
        if commit is None or commit.has_folder or now < commit.begun + ASK_SECONDS:
            return []
        missing = sorted(set(range(self._size)) - commit.requesters)
        names = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
        subject = f"rank {names} has not" if len(missing) == 1 else f"ranks {names} have not"
        return self._no_commit(f"{subject} asked for it within {ASK_SECONDS:g} s: every rank calls commit")

    def made(self, step: int, path: str | None, error: str | None) -> list[Out]:
        """The folder of a checkpoint exists, or cannot be made."""
        commit = self.commit
        if commit is None or commit.step != step:
            return []
        if error is not None:
            return self._no_commit(error)
        commit.has_folder = True
        return [(None, {"kind": "begun", "step": step, "path": path, "error": None})]

    def listed(self, shares: Mapping[int, list[str]], path: str) -> list[Out]:
        """The files of a checkpoint are divided among the ranks, which hash them."""
        assert self.commit is not None
        self.commit.hashing = {*shares}
        step = self.commit.step
        return [(rank, {"kind": "hash", "step": step, "path": path, "files": files}) for rank, files in shares.items()]

    def closed(self, path: str | None, error: str | None) -> list[Out]:
        """A checkpoint is committed, or has failed."""
        commit, self.commit = self.commit, None
        if commit is None:
            return []
        return [(None, {"kind": "committed", "step": commit.step, "path": path, "error": error})]

    def _asked(self, reason: str) -> list[Out]:
        if self.stop_reason is not None:
            return []
        self.stop_reason = reason
        # Ranks without a connected program act at once; the others when the round has agreed on a check.
        told: list[Out] = [(None, {"kind": "stop", "reason": reason})]
        return told + self._told(self.agreement.ask(STOP, reason, self.members))

    def _told(self, messages: Iterable[Prepare | Verdict]) -> list[Out]:
        return [
            (None, {"kind": "prepare" if isinstance(message, Prepare) else "verdict", **vars(message)})
            for message in messages
        ]

    def _left(self, member: int, now: float) -> list[Out]:
        if self.members.pop(member, None) is None:
            return []
        messages = self._told(self.agreement.left(member, self.members))
        commit = self.commit
        if commit is not None and not commit.closing and member not in commit.ended:
            # Its part is missing, or never came.
            return messages + self._no_commit(f"the program of rank {member} has ended before it was saved")
        return messages

    def _begin(self, member: int, step: int, now: float) -> list[Out]:
        if self.commit is None:
            self.commit = Commit(step, now)
        commit = self.commit
        if commit.step != step or commit.has_folder:
            return self._no_commit(f"ranks ask for checkpoints of different steps, {commit.step} and {step}", step)
        commit.requesters.add(member)
        gone = self._seen - {*self.members}
        if gone:
            return self._no_commit(f"the program of rank {min(gone)} has ended without it")
        if len(commit.requesters) < self._size:
            return []
        return [(0, {"kind": "make", "step": step})]

    def _end(self, member: int, step: int, error: str | None) -> list[Out]:
        commit = self.commit
        if commit is None or commit.step != step or not commit.has_folder:
            return []
        commit.ended[member] = error
        if {*commit.ended} != commit.requesters:
            return []
        for _, failure in sorted(commit.ended.items()):
            if failure is not None:
                return self._no_commit(failure)
        commit.closing = True
        return [(0, {"kind": "list", "step": step})]

    def _hashed(self, rank: int, message: Message) -> list[Out]:
        commit = self.commit
        if commit is None or commit.step != message["step"] or rank not in commit.hashing:
            return []
        if message.get("error") is not None:
            return self._no_commit(str(message["error"]))
        commit.hashing.discard(rank)
        commit.records += message["records"]
        return [] if commit.hashing else [(0, {"kind": "finish", "step": commit.step, "records": commit.records})]

    def _no_commit(self, error: str, other: int | None = None) -> list[Out]:
        """Nothing is committed, and every member that waits gets the reason."""
        commit, self.commit = self.commit, None
        steps = [step for step in (commit.step if commit is not None else None, other) if step is not None]
        messages: list[Out] = [(0, {"kind": "abandon", "step": steps[0], "reason": error})] if steps else []
        for step in dict.fromkeys(steps):
            messages.append((None, {"kind": "begun", "step": step, "path": None, "error": error}))
            messages.append((None, {"kind": "committed", "step": step, "path": None, "error": error}))
        return messages

    def _ended(self, rank: int, message: Message, now: float) -> list[Out]:
        self.ends[rank] = message
        if message["code"] not in (EXIT_DONE, EXIT_PREEMPTED):
            return self._fail(rank, message, now)
        if len(self.ends) == self._ranks and self._cause is None:
            codes = {end["code"] for end in self.ends.values()}
            code = EXIT_PREEMPTED if EXIT_PREEMPTED in codes else EXIT_DONE
            return [(None, {"kind": "over", "code": code})]
        return []

    def _fail(self, rank: int, message: Message, now: float) -> list[Out]:
        """A rank has failed. One whose program lost another's is not the cause: that one's end is waited for."""
        self.ends.setdefault(rank, message)
        second_hand = bool(message["communication"]) and len(self.ends) < self._ranks
        if self._cause is None or (self._cause[1]["communication"] and not message["communication"]):
            self._cause = (rank, message, now + SETTLE if second_hand else now)
        return self.tick(now)
