"""Stores the weights that nodes make of numbers alone, so that they are parameters like those in the file.

Called by `source` and `inspect` before `classify`. Tools that make files small replace large weights by ConstantOfShape
or Range; the ONNX model zoo's light files are such.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import needed_by, prune
from ortflow.workflow.graph.ir.recorded_roles import recorded
from ortflow.workflow.graph.names import is_made_up
from ortflow.workflow.graph.roles import role_heuristics, scopes
from ortflow.workflow.spec.model import ParameterPatterns

_FILLING = frozenset(
    (
        "Add", "Cast", "ConstantOfShape", "Div", "Expand", "Identity", "Mul", "Range", "ReduceProd", "Reshape",
        "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze",
    )
)  # fmt: skip
"""Operators that make weights of numbers. Others, such as Sin or Trilu, make tables and masks."""
_SCALING = ("Add", "Mul")
"""Operators of scales and shifts."""
_LARGEST = 1024
"""Integer tensors with more elements are no shapes; `fold` makes none that are larger."""
_LISTED = 3


def store_made_weights(model: onnx.ModelProto, patterns: ParameterPatterns) -> tuple[list[str], list[str]]:
    """Replace nodes that make weights by initializers, in place; returns log lines and warnings.

    A weight is stored if its name is its own, or if a pattern of the run file matches it. Under a generated name it may
    be a `torch.ones` in `forward`: it stays, and a warning names it. What `export_for_training` wrote is left alone.
    """
    graph = model.graph
    places = {} if recorded(model) else _places(model)
    values = _evaluated(model, list(places)) if places else {}
    is_own = _owned(model, patterns)
    stored = {name: value for name, value in values.items() if is_own(name)}
    untrained = [name for name in values if name not in stored and not _is_placeholder(places[name])]
    if stored:
        graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
        replace(graph.node, [node for node in graph.node if stored.keys().isdisjoint(node.output)])
        prune(graph)
    notes = [f"made by nodes, and stored as weights: {_few([repr(name) for name in stored])}"] if stored else []
    examples = _few([f"{name!r} (weight of {places[name].op_type})" for name in untrained])
    them = "they are" if len(untrained) > 1 else "it is"
    warning = f"not trained, because {them} made by nodes: {examples}; model.parameters.train overrides this"
    return notes, [warning] if untrained else []


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _owned(model: onnx.ModelProto, patterns: ParameterPatterns) -> Callable[[str], bool]:
    listed = {name for names in scopes.exported_tensors(model).values() for name in names}
    globs = [*patterns.train, *patterns.freeze, *patterns.constant]

    def is_own(name: str) -> bool:
        by_user = any(fnmatch.fnmatchcase(name, glob) for glob in globs)
        return by_user or (name in listed if listed else not is_made_up(name))

    return is_own


def _is_placeholder(node: onnx.NodeProto) -> bool:
    """Whether a module without a weight has ones or zeros in its place."""
    return node.op_type in _SCALING or node.op_type.endswith("Normalization")


def _places(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """The fp32 values that are made of numbers and read as weights -> a node that reads them, also rearranged."""
    graph = model.graph
    makers = _made(model)
    if not makers:
        return {}
    consumers, types = walk.readers(graph), shapes.value_types(model)
    producers = {name: node for node in walk.with_branches(graph.node) for name in node.output if name}
    with_data = _with_data(graph)
    outputs = {value.name for value in graph.output}
    readers_of: dict[str, onnx.NodeProto] = {}
    derived: set[str] = set()
    for name, maker in makers.items():
        if not derived.isdisjoint(maker.input):
            derived.add(name)
            continue
        # A filled tensor has the weight's name, and may be rearranged as a stored one; else the last value has it.
        readers = consumers.get(name, ())
        final = maker.op_type == "ConstantOfShape" or any(makers.keys().isdisjoint(node.output) for node, _ in readers)
        dims = shapes.shape(types, name)
        fp32 = shapes.element_type(types, name) == TensorProto.FLOAT
        if not final or not fp32 or not dims or None in dims or name in outputs:
            continue
        sizes = tuple(size or 0 for size in dims)
        for node, place in role_heuristics.uses(name, consumers):
            if not with_data.isdisjoint(node.output) and _is_weight(node, place, sizes, producers):
                readers_of[name] = node
                derived.add(name)
                break
    return readers_of


def _is_weight(node: onnx.NodeProto, place: int, shape: tuple[int, ...], producers: dict[str, onnx.NodeProto]) -> bool:
    layer = role_heuristics.is_weight(node, place) or role_heuristics.is_state(node, place)
    return layer or node.op_type in _SCALING or role_heuristics.is_bias(node, place, shape, producers)


def _made(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    """Values of the main graph that nodes make of shapes and single numbers, in the nodes' order."""
    # PyTorch gives names only to parameters and buffers: weights made of these follow them.
    trains_numbers = model.producer_name == "pytorch"
    numbers = set()
    for tensor in model.graph.initializer:
        count = math.prod(tensor.dims)
        if tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
            is_number = count <= _LARGEST
        else:
            is_number = count == 1 and tensor.data_type == TensorProto.FLOAT
            is_number = is_number and (is_made_up(tensor.name) or not trains_numbers)
        if is_number:
            numbers.add(tensor.name)
    makers: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        if node.op_type in _FILLING and node.domain == "" and numbers.issuperset(filter(None, node.input)):
            makers[node.output[0]] = node
            numbers.add(node.output[0])
    return makers


def _with_data(graph: onnx.GraphProto) -> set[str]:
    """Values that depend on an input of the model."""
    dependent = {value.name for value in graph.input}
    for node in walk.with_branches(graph.node):
        if not dependent.isdisjoint(walk.inputs(node)):
            dependent.update(filter(None, node.output))
    return dependent


def _evaluated(model: onnx.ModelProto, names: Sequence[str]) -> Mapping[str, np.ndarray]:
    """The values that are no ranges and tables; none if onnx cannot compute one of them."""
    from onnx.reference import ReferenceEvaluator

    nodes = [model.graph.node[place] for place in sorted(needed_by(model.graph.node, names))]
    read = {name for node in nodes for name in node.input}
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in read]
    graph = helper.make_graph(nodes, "weights", [], outputs, tensors)
    versions = {opset.domain: opset.version for opset in model.opset_import}
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(graph, versions).run(None, {})
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return {}
    # ascontiguousarray makes a vector of a scalar.
    arrays = (np.asarray(result, np.float32, order="C") for result in results)
    values = dict(zip(names, arrays, strict=True))
    return {name: array for name, array in values.items() if role_heuristics.constant_pattern(array) is None}
