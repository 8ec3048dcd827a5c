"""Moves the weights in branches of an If and bodies of loops to the main graph, where parameters are looked for.

Called by `prepare`. Exporters that inline two networks under one condition write their weights so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import rename_values, replace
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.writer import Fresh
from ortflow.workflow.graph.normalize.tidy import constant_of


def weights_of_branches_to_initializers(model: onnx.ModelProto) -> None:
    """Make each fp32 Constant and initializer of a branch or body that has axes one of the main graph, in place.

    It keeps its name if no other value of the model has it. Scalars are exponents and limits rather than weights.
    """
    graph = model.graph
    if not any(any(walk.subgraphs(node)) for node in graph.node):
        return
    producers = Counter(name for node in walk.nodes(graph.node) for name in node.output)
    for any_graph in walk.all_graphs(model):
        producers.update(value.name for value in (*any_graph.input, *any_graph.initializer))
    _move(graph.node, graph, producers, fresh_names(graph))


def _move(nodes: Iterable[onnx.NodeProto], main: onnx.GraphProto, producers: Counter[str], fresh: Fresh) -> None:
    for node in nodes:
        for branch in walk.subgraphs(node):
            outputs = {value.name for value in branch.output}
            names: dict[str, str] = {}
            for tensor in _weights(branch, outputs):
                old = tensor.name
                names[old] = old if producers[old] == 1 else fresh(old)
                main.initializer.append(tensor)
                main.initializer[-1].name = names[old]
            replace(branch.initializer, [tensor for tensor in branch.initializer if tensor.name not in names])
            replace(branch.node, [inner for inner in branch.node if names.keys().isdisjoint(inner.output)])
            for inner in branch.node:
                rename_values(inner, names)
            _move(branch.node, main, producers, fresh)


def _weights(branch: onnx.GraphProto, outputs: set[str]) -> list[onnx.TensorProto]:
    """Tensors under the names of their values; a branch's own output stays in it."""
    tensors = [*branch.initializer, *filter(None, map(constant_of, branch.node))]
    return [
        tensor
        for tensor in tensors
        if tensor.data_type == TensorProto.FLOAT and tensor.dims and tensor.name not in outputs
    ]
