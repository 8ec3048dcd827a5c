"""Weights that several stage files have under one name: one weight of the model, or several. Pure. Called by `join`.

A tensor with the same name, shape, type and bits in several files is one weight, such as an embedding that is also the
output layer. Equal numbers throughout prove nothing: new scales are 1 and new biases are 0 in every layer.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from ortflow.workflow.graph.ir.recorded_roles import recorded

Kind = Literal["tied", "other values", "equal numbers", "untied"]
_REAL = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class SameName:
    """A tensor of a stage that has the name, shape and type of one of an earlier stage."""

    name: str
    stage: int
    first: int
    """The earlier stage: the first with the same bits if there is one, or the first of all."""
    kind: Kind
    """tied: it is the same weight. Otherwise it is another one: its values differ, its elements are all equal, or a
    pattern matches its name.
    """
    real: bool
    """Whether it could be a trained weight, and not an index or a condition."""


def same_names(models: Sequence[onnx.ModelProto], untied: Sequence[str] = ()) -> list[SameName]:
    """The tensors that share a name, stage by stage.

    Parameters
    ----------
    models
        The stages.
    untied
        Glob patterns of names that are different weights in each file, whatever their values.

    Raises
    ------
    UserError
        If what `export_for_training` recorded in a model cannot be read.
    """
    roles = [{name: key for key, names in recorded(model).items() for name in names} for model in models]
    earlier: dict[tuple[object, ...], list[tuple[int, TensorProto]]] = {}
    pairs = []
    for number, model in enumerate(models):
        public = {value.name for value in model.graph.output}
        for tensor in model.graph.initializer:
            if tensor.name in public:
                continue
            key = (tensor.name, tuple(tensor.dims), tensor.data_type, roles[number].get(tensor.name))
            before = earlier.setdefault(key, [])
            if before:
                first, kind = _compared(tensor, before, untied)
                pairs.append(SameName(tensor.name, number, first, kind, tensor.data_type in _REAL))
            before.append((number, tensor))
    return pairs


def _compared(
    tensor: TensorProto, earlier: Sequence[tuple[int, TensorProto]], untied: Sequence[str]
) -> tuple[int, Kind]:
    """The stage that a tensor is compared with, and the outcome."""
    first = earlier[0][0]
    if any(fnmatch.fnmatchcase(tensor.name, pattern) for pattern in untied):
        return first, "untied"
    array = numpy_helper.to_array(tensor)
    bits = array.tobytes()
    equal_stage = next((stage for stage, other in earlier if numpy_helper.to_array(other).tobytes() == bits), None)
    if equal_stage is None:
        return first, "other values"
    return (equal_stage, "tied") if array.size and np.any(array != array.flat[0]) else (first, "equal numbers")
