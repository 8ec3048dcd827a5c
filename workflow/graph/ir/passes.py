"""Applies passes to a graph, one after the other, and checks that each leaves a whole graph.

ONNX Runtime would only say which output has no node, once the last pass has run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx

from ortflow.workflow.errors import OrtflowError, UserError

Pass = Callable[[onnx.ModelProto], onnx.ModelProto]


def applied(model: onnx.ModelProto, *passes: Pass) -> onnx.ModelProto:
    """The model after all passes, in this order.

    Raises OrtflowError with the name of the pass behind which an output of the graph has no node, or a node waits for
    itself.
    """
    for each in passes:
        try:
            model = each(model)
        except UserError:
            raise
        except OrtflowError as error:
            raise _fault(each, str(error)) from error
        missing = outputs_without_nodes(model.graph)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise _fault(each, f"output {missing[0]!r}{more} of the graph has no node that computes it")
    return model


def outputs_without_nodes(graph: onnx.GraphProto) -> list[str]:
    """Outputs that no node computes and that are neither inputs nor initializers."""
    made = {name for node in graph.node for name in node.output}
    made |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.output if value.name not in made]


def _fault(each: Pass, what: str) -> OrtflowError:
    function = each.func if isinstance(each, functools.partial) else each
    name = getattr(function, "__name__", type(function).__name__)
    return OrtflowError(f"a graph is not whole after {name!r}, which is an error of ortflow: {what}")
