"""Gives a graph's weights a uniform representation: each a used initializer with its own name that is not an input.

Called by `prepare`.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import attributes_of, replace
from ortflow.workflow.graph.ir.functions import numbered
from ortflow.workflow.graph.ir.stops import stops_gradient
from ortflow.workflow.graph.names import is_made_up


def initializers_are_no_inputs(model: onnx.ModelProto) -> None:
    """Remove initializers from the inputs, where IR version 3 also required them, in place."""
    names = {tensor.name for tensor in model.graph.initializer}
    replace(model.graph.input, [value for value in model.graph.input if value.name not in names])


def forget_negative_sizes(model: onnx.ModelProto) -> None:
    """Make every negative size of an axis unknown, in place: Paddle2ONNX writes -1, and onnx's inference of a Slice
    along such an axis ends the process.
    """
    for graph in walk.all_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_value < 0:
                    dim.Clear()


def constants_to_initializers(model: onnx.ModelProto) -> None:
    """Convert the main graph's Constant nodes to initializers with the same names, in place."""
    if not any(node.op_type == "Constant" for node in model.graph.node):
        return
    nodes_left = []
    for node in model.graph.node:
        tensor = constant_of(node)
        if tensor is None:
            nodes_left.append(node)
        else:
            model.graph.initializer.append(tensor)
    replace(model.graph.node, nodes_left)


def constant_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """A copy of a Constant node's value, named like its output; None for other nodes, texts and sparse values."""
    if node.op_type != "Constant" or node.domain != "" or len(node.attribute) != 1:
        return None
    attribute = node.attribute[0]
    if attribute.name == "value":
        tensor = onnx.TensorProto.FromString(attribute.t.SerializeToString())
        tensor.name = node.output[0]
        return tensor
    kind = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name not in kind:
        return None
    value = helper.get_attribute_value(attribute)
    return numpy_helper.from_array(np.array(value, kind[attribute.name]), node.output[0])


def cast_like_to_cast(model: onnx.ModelProto) -> None:
    """Replace CastLike by Cast, in place."""
    # ONNX Runtime would differentiate with respect to the input that gives the type.
    if not any(node.op_type == "CastLike" for node in model.graph.node):
        return
    types = shapes.value_types(model)
    for node in model.graph.node:
        if node.op_type == "CastLike" and node.domain == "":
            kind = shapes.element_type(types, node.input[1])
            # onnx cannot infer the types of ONNX Runtime's own operators, which are fp32 here.
            node.attribute.append(helper.make_attribute("to", kind or TensorProto.FLOAT))
            node.op_type = "Cast"
            del node.input[1:]


def pad_before_pooling(model: onnx.ModelProto) -> None:
    """Move the padding of AveragePool with ceil_mode and count_include_pad to a node of its own, in place.

    ONNX Runtime 1.19 divides by the full window size even where a window extends beyond the padding.
    """
    if not any(node.op_type == "AveragePool" for node in model.graph.node):
        return
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        attributes = attributes_of(node) if node.op_type == "AveragePool" else {}
        counted = attributes.get("ceil_mode", 0) and attributes.get("count_include_pad", 0)
        if counted and attributes.get("auto_pad", b"NOTSET") == b"NOTSET":
            pads = attributes.pop("pads", [])
            if any(pads):
                half = len(pads) // 2
                widths = numpy_helper.from_array(np.array([0, 0, *pads[:half], 0, 0, *pads[half:]], np.int64))
                names = [f"{node.output[0]}.{suffix}" for suffix in ("pads", "padded")]
                nodes.append(helper.make_node("Constant", [], names[:1], value=widths))
                nodes.append(helper.make_node("Pad", [node.input[0], names[0]], names[1:], f"{node.name}.pad"))
                node.input[0] = names[1]
            del node.attribute[:]
            node.attribute.extend(
                helper.make_attribute(name, value) for name, value in {**attributes, "count_include_pad": 0}.items()
            )
        nodes.append(node)
    replace(model.graph.node, nodes)


def drop_transposes_that_move_nothing(model: onnx.ModelProto) -> None:
    """Remove Transpose nodes that move nothing, in place.

    ONNX Runtime's GemmTransposeFusion assumes that each Transpose before a Gemm swaps the axes.
    """
    if not any(node.op_type == "Transpose" for node in model.graph.node):
        return
    outputs = {value.name for value in model.graph.output}
    source: dict[str, str] = {}
    nodes_left = []
    for node in model.graph.node:
        order = list(attributes_of(node).get("perm", ())) if node.op_type == "Transpose" and node.domain == "" else []
        if not order or order != sorted(order):
            nodes_left.append(node)
        elif node.output[0] in outputs:
            nodes_left.append(helper.make_node("Identity", node.input, node.output, node.name))
        else:
            source[node.output[0]] = source.get(node.input[0], node.input[0])
    _rename_reads(nodes_left, source)
    replace(model.graph.node, nodes_left)


def resolve_aliases(model: onnx.ModelProto) -> list[str]:
    """Let all nodes read a weight itself rather than an Identity of it, in place; returns log lines.

    TorchScript's exporter writes Identity for a tied weight, and in evaluation mode also for a weight that merely has
    equal values, such as all LayerNorm weights of a fresh model. A tied weight is not a uniform tensor, so an alias of
    a uniform tensor becomes a parameter of its own, under the alias' name, as in the module. If the alias is the only
    reader of the weight (a clone in forward), it is the weight itself.
    """
    if not any(node.op_type == "Identity" for node in model.graph.node):
        return []
    readers = walk.consumers(model.graph)
    by_name = {tensor.name: tensor for tensor in model.graph.initializer}
    outputs = {value.name for value in model.graph.output}
    source: dict[str, str] = {}
    separated: list[str] = []
    nodes_left = []
    for node in model.graph.node:
        read = node.input[0] if len(node.input) == 1 else ""
        read = source.get(read, read)
        alias = node.op_type == "Identity" and not stops_gradient(node)
        if not alias or read not in by_name or node.output[0] in outputs:
            nodes_left.append(node)
        elif _uniform(by_name[read]) and len(readers[node.input[0]]) > 1:
            copy = onnx.TensorProto.FromString(by_name[read].SerializeToString())
            copy.name = node.output[0]
            model.graph.initializer.append(copy)
            by_name[copy.name] = copy
            separated.append(copy.name)
        else:
            source[node.output[0]] = read
    _rename_reads(nodes_left, source)
    replace(model.graph.node, nodes_left)
    if not separated:
        return []
    names = ", ".join(separated[:3]) + (f" and {len(separated) - 3} more" if len(separated) > 3 else "")
    return [f"were merged with tensors of equal values and are separated: {names}"]


def tie_transposed_copies(model: onnx.ModelProto) -> list[str]:
    """Replace a weight that is the transpose of another by a Transpose of that one, in place; returns log lines.

    Exporters fold the transposition of a linear layer's weight into a new tensor with a generated name, so that an
    output layer tied to an embedding would be trained separately.
    """
    tensors_by_shape: dict[tuple[int, ...], list[onnx.TensorProto]] = {}
    made_up = []
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 2:
            if is_made_up(tensor.name):
                made_up.append(tensor)
            else:
                tensors_by_shape.setdefault(tuple(tensor.dims), []).append(tensor)
    tied: dict[str, str] = {}
    for tensor in made_up:
        candidates = tensors_by_shape.get(tuple(reversed(tensor.dims)), [])
        # A fresh model has many tensors of zeros or ones, which are not tied.
        if not candidates or _uniform(tensor):
            continue
        values = numpy_helper.to_array(tensor).T
        for candidate in candidates:
            if np.array_equal(values, numpy_helper.to_array(candidate)):
                tied[tensor.name] = candidate.name
                break
    if not tied:
        return []
    replace(model.graph.initializer, [tensor for tensor in model.graph.initializer if tensor.name not in tied])
    transposes = [helper.make_node("Transpose", [old], [new], perm=[1, 0]) for new, old in tied.items()]
    replace(model.graph.node, [*transposes, *model.graph.node])
    return [f"{new} is {old} transposed, and is tied to it" for new, old in tied.items()]


def _uniform(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != TensorProto.FLOAT or not tensor.dims:
        return False
    values = numpy_helper.to_array(tensor)
    return values.size > 1 and bool((values == values.flat[0]).all())


def _rename_reads(nodes: list[onnx.NodeProto], new_names: dict[str, str]) -> None:
    if not new_names:
        return
    for node in walk.nodes(nodes):
        node.input[:] = [new_names.get(name, name) for name in node.input]
        for graph in walk.subgraphs(node):
            for value in graph.output:
                value.name = new_names.get(value.name, value.name)


def name_nodes(model: onnx.ModelProto) -> None:
    """Give each node of the main graph a unique name, in place; ONNX Runtime rejects duplicates."""
    fresh = numbered(set(), last=1)
    for node in model.graph.node:
        node.name = fresh(node.name or next((name for name in node.output if name), node.op_type))
