"""Checks that the samples are on an output's first axis. Called by `loss` and `compared`."""

from __future__ import annotations

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir.edit import dims_of
from ortflow.workflow.graph.objective.labels import Dims, text


def checked_dims(graph: onnx.GraphProto, output: onnx.ValueInfoProto, batch: str, location: str) -> Dims:
    """The shape of an output. Raises UserError if it is unknown, or if the samples are not on its first axis."""
    dims = dims_of(output)
    if not dims:
        shape = "no axes" if dims == () else "an unknown number of axes"
        raise UserError(
            f"output {output.name!r} has {shape}",
            where=location,
            fix="export the model with shapes, or name another output",
        )
    (first,) = (dims_of(value) for value in graph.input if value.name == batch)
    samples = first[0] if first else None
    if isinstance(samples, str) and samples != dims[0] and samples in dims:
        # As behind PyTorch's recurrent layers.
        raise UserError(
            f"output {output.name!r} of shape {text(dims)} has the samples on axis {dims.index(samples)}",
            where=location,
            fix="transpose it in the model, so that they are on its first axis, and so are the labels'",
        )
    return dims
