"""Run the exporter's optimizer on a traced program, and keep what training needs.

Called by `ortflow.export`. The optimizer merges initializers of equal value, folds what is constant, replaces equal
nodes by one, and drops `+ c` and `* c` where c is close to 0 or 1. For inference that is harmless. Here it must not
happen to parameters and buffers, to dropout masks, or to a small epsilon that keeps a root or a logarithm finite.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator
from itertools import count
from typing import Any

from ortflow.workflow.errors import UserError

_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_LIMITING = frozenset({"Clip", "Max", "Min", "Relu"})
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
        values |= _hide(model, [*_near_identities(model.graph), *_bounds_apart(model.graph)])
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


def _hide(model: Any, operands: Iterable[tuple[Any, int]]) -> dict[str, Any]:
    """Turn constants that are operands of nodes into inputs; returns their values by name."""
    import onnx_ir as ir

    graph = model.graph
    used_names = {value.name for node in graph.all_nodes() for value in node.outputs}
    used_names |= {value.name for value in graph.inputs} | set(graph.initializers)
    fresh: Iterator[str] = (name for i in count() if (name := f"constant_{i}") not in used_names)
    hidden: dict[int, Any] = {}
    values = {}
    for node, place in operands:
        value = node.inputs[place]
        if id(value) not in hidden:
            name = next(fresh)
            new = ir.Value(name=name, type=value.type, shape=value.const_value.shape)
            values[name] = value.const_value
            graph.inputs.append(new)
            hidden[id(value)] = new
        node.replace_input_with(place, hidden[id(value)])
    return values


def _near_identities(graph: Any) -> list[tuple[Any, int]]:
    """Constants that the optimizer would wrongly treat as 0 or 1, by node and place.

    And those of random nodes: onnxscript 0.7 draws a Bernoulli of constants once, and the drawn numbers are a constant.
    """
    return [
        (node, place)
        for node in graph.all_nodes()
        if node.domain == "" and node.op_type in _ARITHMETIC | _RANDOM
        for place, value in enumerate(node.inputs[:1] if _is_random(node) else node.inputs)
        if value is not None and value.const_value is not None
        if _is_random(node) or near_identity(value.const_value)
    ]


def _bounds_apart(graph: Any) -> list[tuple[Any, int]]:
    """Constant bounds of nodes that limit a value to a range in which nothing of the value's own range lies.

    onnxscript 0.7.2 merges such limits: a value from -2 to -1 that is then limited to 1 to 2 became -1 in place of 1.
    """
    ranges: dict[int, tuple[float, float]] = {}
    apart: dict[tuple[int, int], tuple[Any, int]] = {}
    for node in graph.all_nodes():
        limits = _limits(node)
        if limits is None:
            continue
        value, low, high = limits
        own_low, own_high = ranges.get(id(value), (-math.inf, math.inf))
        if low > own_high or high < own_low:
            # Where the node has no constants, as a Relu, those of the one before it are hidden.
            for limiting in (node, value.producer()):
                for place in _constants(limiting):
                    apart[id(limiting), place] = (limiting, place)
        ranges[id(node.outputs[0])] = min(max(own_low, low), high), min(max(own_high, low), high)
    return [*apart.values()]


def _limits(node: Any) -> tuple[Any, float, float] | None:
    """The value that a node limits to a range of constants, and the range; None if it does not."""
    if node.domain != "" or node.op_type not in _LIMITING or not node.inputs or node.inputs[0] is None:
        return None
    places = _constants(node)
    numbers = {place: node.inputs[place].const_value.numpy() for place in places}
    if not all(array.size and array.dtype.kind == "f" for array in numbers.values()):
        return None
    if node.op_type == "Relu":
        return node.inputs[0], 0.0, math.inf
    if node.op_type == "Clip":
        low, high = (numbers.get(place) for place in (1, 2))
        if len(places) < sum(value is not None for value in node.inputs[1:]):
            return None
        return (
            node.inputs[0],
            -math.inf if low is None else float(low.max()),
            math.inf if high is None else float(high.min()),
        )
    others = [value for place, value in enumerate(node.inputs) if place not in places]
    if len(others) != 1 or not places:
        return None
    bounds = [float(end) for array in numbers.values() for end in (array.min(), array.max())]
    return (others[0], max(bounds), math.inf) if node.op_type == "Max" else (others[0], -math.inf, min(bounds))


def _constants(node: Any) -> list[int]:
    """The places of a limiting node's operands that are constants."""
    if node is None or node.domain != "" or node.op_type not in _LIMITING:
        return []
    return [place for place, value in enumerate(node.inputs) if value is not None and value.const_value is not None]


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
