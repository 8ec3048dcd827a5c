"""Run the exporter's optimizer on a traced program, and keep what training needs.

Called by `ortflow.export`. The optimizer merges initializers of equal value, folds what is constant, replaces equal
nodes by one, and drops `+ c` and `* c` where c is close to 0 or 1. For inference that is harmless. Here it must not
happen to parameters and buffers, to dropout masks, or to a small epsilon that keeps a root or a logarithm finite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator
from itertools import count
from typing import Any

from ortflow.workflow.errors import UserError

_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_RANDOM = frozenset({"Dropout", "Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})


def optimize(program: Any, protected: Collection[str]) -> None:
    """Optimize `program.model` in place, except for the initializers named in `protected`.

    Unused ones are removed. Values that the optimizer must not see are graph inputs while it runs.
    """
    import onnx_ir as ir
    import onnxscript.optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from folding infinite constants
        model = program.model
        values = {}
        # Equal ones become one: all LayerNorm weights of a fresh model, which are ones, would be trained as one tensor.
        for name in [name for name in model.graph.initializers if name in protected]:
            value = model.graph.initializers.pop(name)
            values[name], value.const_value = value.const_value, None
            model.graph.inputs.append(value)
        # Folds computed constants first, so that the search below finds them.
        onnxscript.optimizer.inline(model)
        try:
            onnxscript.optimizer.fold_constants_ir(model, should_fold=lambda node: False if _is_random(node) else None)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            # onnxscript 0.7.2 fails at a SplitToSequence of pieces whose size is computed: chunk() of a dynamic axis.
            raise UserError(
                f"onnxscript cannot optimize the exported model: {error}",
                fix="give the sizes of axes that forward splits: leave them out of dynamic_shapes",
            ) from error
        values |= _hide_near_identities(model)
        # Small: the weights are inputs.
        before = ir.serde.serialize_model(model)
        marks = _mark_random_nodes(model)
        program.optimize()
        if _dangling(program.model.graph):
            # onnxscript 0.7.2 removes the bounds of a Clip when it merges two of one value.
            program.model = ir.serde.deserialize_model(before)
    graph = program.model.graph
    marked = {id(mark) for mark in marks}
    for node in graph.all_nodes():
        if id(node.attributes.get("seed")) in marked:
            node.attributes.pop("seed")
    for value in [value for value in graph.inputs if value.name in values]:
        graph.inputs.remove(value)
        if value.uses() or value.is_graph_output():
            value.const_value = values[value.name]
            graph.initializers[value.name] = value


def _dangling(graph: Any) -> bool:
    """Whether a node of the graph reads a value that nothing produces."""
    produced = {id(value) for node in graph.all_nodes() for value in node.outputs}
    for any_graph in (graph, *graph.subgraphs()):
        produced |= {id(value) for value in (*any_graph.inputs, *any_graph.initializers.values())}
    read = [value for node in graph.all_nodes() for value in node.inputs if value is not None]
    return any(id(value) not in produced for value in (*read, *graph.outputs))


def _hide_near_identities(model: Any) -> dict[str, Any]:
    """Turn constants that the optimizer would wrongly treat as 0 or 1 into inputs; returns their values by name.

    And those of random nodes: onnxscript 0.7 draws a Bernoulli of constants once, and the drawn numbers are a constant.
    """
    import onnx_ir as ir

    graph = model.graph
    used_names = {value.name for node in graph.all_nodes() for value in node.outputs}
    used_names |= {value.name for value in graph.inputs} | set(graph.initializers)
    fresh: Iterator[str] = (name for i in count() if (name := f"constant_{i}") not in used_names)
    hidden: dict[int, Any] = {}
    values = {}
    for node in [node for node in graph.all_nodes() if node.domain == "" and node.op_type in _ARITHMETIC | _RANDOM]:
        for place, value in enumerate(node.inputs[:1] if _is_random(node) else node.inputs):
            if value is None or value.const_value is None:
                continue
            if not _is_random(node) and not near_identity(value.const_value):
                continue
            if id(value) not in hidden:
                name = next(fresh)
                new = ir.Value(name=name, type=value.type, shape=value.const_value.shape)
                values[name] = value.const_value
                graph.inputs.append(new)
                hidden[id(value)] = new
            node.replace_input_with(place, hidden[id(value)])
    return values


def _is_random(node: Any) -> bool:
    return node.op_type in _RANDOM and node.domain == ""


def near_identity(tensor: Any) -> bool:
    """Whether a number is close to 0 or 1, but neither. Wider than the optimizer's tolerances of 1e-8 and 1e-5."""
    if tensor.size != 1 or not tensor.dtype.is_floating_point():
        return False
    number = float(tensor.numpy().item())
    return number not in (0.0, 1.0) and (abs(number) < 1e-6 or math.isclose(number, 1.0, rel_tol=1e-4))


def _mark_random_nodes(model: Any) -> list[Any]:
    """Give each random node its own seed, so that no two are equal; returns the attributes, for their removal."""
    import onnx_ir as ir

    marks: list[Any] = []
    for node in model.graph.all_nodes():
        if node.op_type in _RANDOM and node.domain == "" and "seed" not in node.attributes:
            # ONNX has an integer for Dropout's seed, and a float for the others'.
            kind = ir.AttrInt64 if node.op_type == "Dropout" else ir.AttrFloat32
            mark = kind("seed", len(marks))
            node.attributes.add(mark)
            marks.append(mark)
    return marks
