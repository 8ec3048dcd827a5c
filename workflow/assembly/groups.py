"""Checks the patterns of `train.groups` and `train.layer_decay` against the trained parameters of the model."""

from __future__ import annotations

from collections.abc import Collection

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.patterns import matches
from ortflow.workflow.spec.train import TrainSection
from ortflow.workflow.spec.treatments import holders, layers_of


def check_groups(train: TrainSection, trained: Collection[str]) -> None:
    """Check the patterns against the names of all trained parameters.

    Raises UserError if a pattern matches none, if a parameter is in two groups or layers, or if it is in no layer.
    """
    for number, pattern in enumerate(train.optimizer.adamw if train.optimizer.name == "muon" else ()):
        matches(pattern, trained, f"train.optimizer.adamw[{number}]", "trained parameter")
    for place, group in enumerate(train.groups):
        for number, pattern in enumerate(group.match):
            matches(pattern, trained, f"train.groups[{place}].match[{number}]", "trained parameter")
    layers, key = layers_of(train), "train.layer_decay.layers"
    for pattern in layers:
        matches(pattern, trained, key, "trained parameter")
    for name in trained:
        groups = holders(name, [group.match for group in train.groups])
        if len(groups) > 1:
            raise UserError(
                f"{name} is in group {groups[0]} and in group {groups[1]}",
                where="train.groups",
                fix="write patterns that have no parameter in common",
            )
        layer_numbers = holders(name, [[pattern] for pattern in layers])
        if layers and len(layer_numbers) != 1:
            found_in = (
                f"in layer {layer_numbers[0]} and in layer {layer_numbers[1]}" if layer_numbers else "in no layer"
            )
            raise UserError(
                f"{name} is {found_in}", where=key, fix="write patterns that have each trained parameter exactly once"
            )
