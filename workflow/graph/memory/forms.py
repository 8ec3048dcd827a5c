"""Follows a graph in its plain form and in the one that runs: see `concrete`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from ortflow.workflow.graph.memory.branches import conditions_of
from ortflow.workflow.graph.memory.concrete import followed
from ortflow.workflow.graph.rules.size import Type


@dataclass(frozen=True)
class Forms:
    """A graph in both forms, for inputs of fixed shapes."""

    plain: onnx.ModelProto
    model: onnx.ModelProto
    """The form that runs."""
    types: dict[str, Type]
    """Of the values of both."""
    conditions: Mapping[str, bool]
    """Those of each If of `model` that are known."""


def forms_of(
    plain: onnx.ModelProto,
    model: onnx.ModelProto | None,
    batch: Mapping[str, Sequence[int]],
    types_of_inputs: Mapping[str, Type] | None = None,
) -> Forms:
    """Follow both forms.

    Parameters
    ----------
    plain
        The graph of ONNX's operators.
    model
        The form that runs; None if it is `plain`.
    batch
        Shapes of the inputs that vary.
    types_of_inputs
        Types of values of other graphs, which are returned, too.
    """
    types, values = followed(plain, batch)
    types = {**(types_of_inputs or {}), **types}
    if model is None:
        return Forms(plain, plain, types, conditions_of(values))
    # Values of both graphs have the same shape; our own nodes keep the names of the values they replace.
    types_of_model, values = followed(model, batch, types)
    return Forms(plain, model, {**types, **types_of_model}, conditions_of(values))
