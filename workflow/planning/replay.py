"""Memory of the passes of a pipeline's rank, which run one behind the other on one arena. Pure.

A forward pass leaves its results in the arena until the backward pass of its micro-batch is over. What a rank receives
and sends is in buffers of its own, outside the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortflow.workflow.graph.memory.arena import Arena
from ortflow.workflow.graph.memory.peak_memory import Event, Peak
from ortflow.workflow.parallel.schedule import Action

AHEAD = 2
"""Messages whose memory is there before the passes that need them (`stage_runner`)."""


@dataclass(frozen=True)
class ChunkMemory:
    """The graphs of one stage of a rank."""

    forward: Sequence[Event]
    """Outputs that later stages and the backward pass read are not freed."""
    backward: Sequence[Event]
    joint: Sequence[Event] | None
    """The two passes as one graph, if they may run as one."""
    arriving: int
    """Bytes of the activations that it receives."""
    stash: int
    """Bytes of those that the backward pass reads."""
    gradients_in: int
    """Bytes of the gradients that it receives."""
    gradients_out: int
    """Bytes of the gradients that it sends."""
    unknown: tuple[str, ...] = ()
    """Values of unknown size."""


@dataclass(frozen=True)
class Replayed:
    """What a rank holds at most."""

    peak: Peak
    """Of the arena."""
    messages: int
    """Bytes of messages outside the arena."""


def replay(actions: Sequence[Action], chunks: Sequence[ChunkMemory]) -> Replayed:
    """The memory of a rank's actions, in order."""
    arena, now, best = Arena(), 0, Peak(0, 0, "", (), ())
    forward_pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received = messages = 0

    def run(events: Sequence[Event]) -> list[tuple[int, int]]:
        nonlocal now, best
        alive: dict[str, tuple[int, int]] = {}
        before = now
        for event in events:
            if event.freed:
                place, count = alive.pop(event.name)
                arena.give(place)
                now -= count
                continue
            alive[event.name] = arena.take(event.size), event.size
            now += event.size
            if now > best.size:
                values = [(name, count) for name, (_, count) in alive.items()]
                if before:
                    values.append((f"{len(forward_pieces)} micro-batches between their passes", before))
                best = Peak(now, 0, event.node, tuple(values), ())
        return list(alive.values())

    def free(pieces: Sequence[tuple[int, int]]) -> None:
        nonlocal now
        for place, count in pieces:
            arena.give(place)
            now -= count

    place = 0
    while place < len(actions):
        action = actions[place]
        chunk, key = chunks[action.chunk], (action.chunk, action.micro_batch)
        ahead = [_arriving(chunks, next_action) for next_action in actions[place + 1 : place + 1 + 2 * AHEAD]]
        posted = sum([size for size in ahead if size][:AHEAD])
        if action.direction == "backward":
            messages = max(messages, received + posted + chunk.gradients_in + 2 * chunk.gradients_out)
            run(chunk.backward)
            free(forward_pieces.pop(key))
            received -= chunk.stash
        elif chunk.joint is not None and _follows(actions, place):
            messages = max(messages, received + posted + chunk.arriving + 2 * chunk.gradients_out)
            free(run(chunk.joint))
            place += 1
        else:
            messages = max(messages, received + posted + chunk.arriving)
            forward_pieces[key] = run(chunk.forward)
            received += chunk.stash
        place += 1
    values = sorted(best.values, key=lambda item: -item[1])
    unknown = tuple(sorted({name for chunk in chunks for name in chunk.unknown}))
    return Replayed(Peak(best.size, arena.reserved, best.node, tuple(values), unknown), messages)


def _arriving(chunks: Sequence[ChunkMemory], action: Action) -> int:
    chunk = chunks[action.chunk]
    return chunk.arriving if action.direction == "forward" else chunk.gradients_in


def _follows(actions: Sequence[Action], place: int) -> bool:
    """Whether the backward pass of the same micro-batch and chunk is next."""
    action = actions[place]
    expected = Action("backward", action.micro_batch, action.chunk)
    return place + 1 < len(actions) and actions[place + 1] == expected
