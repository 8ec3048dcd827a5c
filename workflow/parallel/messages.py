"""Which actions of a pipeline's schedule send to which others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ortflow.workflow.parallel.schedule import Action, Pass


@dataclass(frozen=True)
class Message:
    """A message from one action to another, on another rank or the same."""

    direction: Pass
    """forward: activations, backward: gradients."""
    stage: int
    """The sending stage."""
    micro_batch: int
    sender: tuple[int, int]
    """Rank, and index in the rank's list of actions."""
    receiver: tuple[int, int]

    @property
    def link(self) -> tuple[Pass, int]:
        """Messages of one link arrive in the order in which they are sent."""
        return self.direction, self.stage


@dataclass(frozen=True)
class Traffic:
    """The messages of one rank, by the index of its own action."""

    arriving: dict[int, Message]
    leaving: dict[int, Message]


def traffic(actions: Sequence[Sequence[Action]], stages: int) -> list[Traffic]:
    """The messages of each rank.

    Parameters
    ----------
    actions
        Of each rank, in order.
    stages
        Stages of the model: ranks times chunks per rank.
    """
    ranks = len(actions)
    places = {
        (action.direction, action.stage(rank, ranks), action.micro_batch): (rank, place)
        for rank, rank_actions in enumerate(actions)
        for place, action in enumerate(rank_actions)
    }
    rank_traffic = [Traffic({}, {}) for _ in actions]
    for (direction, stage, micro_batch), sender in places.items():
        target = stage + (1 if direction == "forward" else -1)
        if 0 <= target < stages:
            receiver = places[direction, target, micro_batch]
            message = Message(direction, stage, micro_batch, sender, receiver)
            rank_traffic[sender[0]].leaving[sender[1]] = message
            rank_traffic[receiver[0]].arriving[receiver[1]] = message
    return rank_traffic
