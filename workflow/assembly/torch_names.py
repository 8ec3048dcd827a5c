"""The table of PyTorch's names of a prepared model. Called by `build`."""

from __future__ import annotations

import math
from dataclasses import replace

from onnx import numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.weights.table import PROPERTY, Entry, as_dtype, from_json


def torch_names(source: Source) -> list[Entry] | None:
    """The table of the model file, with the values of entries that the run does not change; None if it has none.

    Raises UserError if the table is damaged or not that of this model.
    """
    text = next((prop.value for prop in source.skeleton.metadata_props if prop.key == PROPERTY), None)
    if text is None:
        return None
    # The run file may have made constants of parameters.
    constants = {tensor.name: tensor for tensor in source.skeleton.graph.initializer}
    sizes = {name: array.size for name, array in source.tensors.items()}
    sizes |= {name: math.prod(tensor.dims) for name, tensor in constants.items()}

    def complete(entry: Entry) -> Entry:
        size = sizes.get(entry.tensor or "")
        if size is not None and size != math.prod(entry.shape):
            raise UserError(
                f"the model's property {PROPERTY!r} gives {entry.name} the shape {list(entry.shape)}, and "
                f"{entry.tensor} has {size} elements",
                fix="export the model again",
            )
        if entry.tensor in source.tensors or entry.tensor not in constants:
            return entry
        value = numpy_helper.to_array(constants[entry.tensor]).reshape(entry.shape)
        return replace(entry, tensor=None, value=as_dtype(value, entry.dtype, entry.name))

    return [complete(entry) for entry in from_json(text)]
