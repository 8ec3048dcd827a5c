"""The table of PyTorch's names of a prepared model. Called by `build`."""

from __future__ import annotations

from dataclasses import replace

from onnx import numpy_helper

from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.weights.table import PROPERTY, Entry, from_json


def torch_names(source: Source) -> list[Entry] | None:
    """The table of the model file, with the values of entries that the run does not change; None if it has none.

    Raises UserError if the table is damaged.
    """
    text = next((prop.value for prop in source.skeleton.metadata_props if prop.key == PROPERTY), None)
    if text is None:
        return None
    # The run file may have made constants of parameters.
    constants = {tensor.name: tensor for tensor in source.skeleton.graph.initializer}

    def complete(entry: Entry) -> Entry:
        if entry.tensor in source.tensors or entry.tensor not in constants:
            return entry
        return replace(entry, tensor=None, value=numpy_helper.to_array(constants[entry.tensor]))

    return [complete(entry) for entry in from_json(text)]
