"""How each parameter is treated, from the run file's groups and layers. Pure.

Called with names of the whole model when its graphs are built (`assembly.groups` checks the patterns), and with names
of a rank's part when it trains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ortflow.workflow.spec.train import TrainSection

_NUMBERS = re.compile(r"\{(\d{1,4})-(\d{1,4})\}")


@dataclass(frozen=True)
class Treatment:
    """Settings of a parameter that differ from the optimizer's."""

    lr_scale: float = 1.0
    own_lr: bool = False
    """Whether `lr_scale` stands for a rate of the parameter's group, and not for a factor."""
    weight_decay: float | None = None
    frozen: int | None = None
    """Number of the group that is frozen at first and has this parameter."""


PLAIN = Treatment()
Treat = Callable[[str], Treatment]


def treatment_of(train: TrainSection) -> Treat:
    """The treatment of a parameter by its name."""
    if not train.groups and train.layer_decay is None:
        return lambda name: PLAIN
    layers = layers_of(train)

    def treat(name: str) -> Treatment:
        group = next(iter(holders(name, [group.match for group in train.groups])), None)
        layer = next(iter(holders(name, [[pattern] for pattern in layers])), None)
        scale, own_rate, decay, frozen = 1.0, False, None, None
        if train.layer_decay is not None and layer is not None:
            scale = train.layer_decay.factor ** (len(layers) - 1 - layer)
        if group is not None:
            settings = train.groups[group]
            scale *= settings.lr / train.optimizer.lr if settings.lr is not None else settings.lr_scale or 1.0
            own_rate = settings.lr is not None
            decay, frozen = settings.weight_decay, group if settings.frozen_until is not None else None
        return Treatment(scale, own_rate, decay, frozen)

    return treat


def layers_of(train: TrainSection) -> list[str]:
    """The patterns of the layers, with numbers in place of ranges; none without `layer_decay`."""
    patterns = []
    for pattern in train.layer_decay.layers if train.layer_decay is not None else ():
        match = _NUMBERS.search(pattern)
        if match is None:
            patterns.append(pattern)
        else:
            numbers = range(int(match[1]), int(match[2]) + 1)
            patterns += [f"{pattern[: match.start()]}{number}{pattern[match.end() :]}" for number in numbers]
    return patterns


def holders(name: str, patterns: Sequence[Sequence[str]]) -> list[int]:
    """The places of the lists with a pattern that matches."""
    return [
        place
        for place, alternatives in enumerate(patterns)
        if any(fnmatchcase(name, pattern) for pattern in alternatives)
    ]
