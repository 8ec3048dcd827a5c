"""Recognises group and instance normalisation in the nodes that exporters write, and replaces each by one node.

Called by `rewrites` on the training graph before it is differentiated. `compose` decomposes the nodes that no kernel of
ours computes.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of, constants_of, described, dims_of
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.origin import inherit

OPERATOR = "GroupNormalization"
"""An operator in com.microsoft, which ONNX Runtime lacks: (x, scale, bias) -> y, and mean and inverse deviation of
each group as [batch, groups, 1]. Scale and bias have one element per channel, in any shape.
"""
_EPSILON = 1e-5
Dims = tuple[int | str | None, ...]


def fuse(graph: onnx.GraphProto) -> None:
    """Replace each InstanceNormalization, with the grouping around it and the scale behind it, by such a node, in
    place.
    """
    finder = _Finder(graph)
    is_changed = False
    for node in graph.node:
        if node.op_type != "InstanceNormalization" or node.domain != "":
            continue
        x, scale, bias = node.input
        channels, root = finder.channels(x, scale), node
        if channels is None or finder.channels(x, bias) != channels:
            continue
        groups = channels
        match = finder.around(node, groups)
        if match is not None:
            root, x, scale, bias = match
        epsilon = float(attributes_of(node).get("epsilon", _EPSILON))
        name = root.output[0]
        fused = onnx.helper.make_node(
            OPERATOR, [x, scale, bias], [name], name=f"{root.name}/{OPERATOR}", domain=MICROSOFT,
            num_groups=groups, epsilon=epsilon,
        )  # fmt: skip
        inherit([fused], root)
        root.CopyFrom(fused)
        is_changed = True
    if is_changed:
        prune(graph)


class _Finder:
    """The producers and readers of a graph's values, and their sizes."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._makers = walk.producers(graph)
        self._readers = walk.consumers(graph)
        self._outputs = {value.name for value in graph.output}
        self._constants = constants_of(graph)
        descriptions = described(graph)
        self._dims: dict[str, Dims | None] = {
            name: dims_of(value) for name, value in descriptions.items() if _is_single(value.type.tensor_type.elem_type)
        }
        self._dims |= {t.name: tuple(t.dims) for t in graph.initializer if _is_single(t.data_type)}

    def channels(self, x: str, vector: str) -> int | None:
        """Number of channels of `x`, if its rank is known and `vector` has one element per channel."""
        dims, sizes = self._dims.get(x), self._dims.get(vector)
        if dims is None or sizes is None or len(dims) < 2 or len(sizes) != 1 or not isinstance(sizes[0], int):
            return None
        return sizes[0] if dims[1] in (sizes[0], None) else None

    def around(self, node: onnx.NodeProto, groups: int) -> tuple[onnx.NodeProto, str, str, str] | None:
        """Match Reshape, `node` without a scale of its own, Reshape back, Mul and Add: the last node, x, scale and
        bias.
        """
        split = self._makers.get(node.input[0])
        target = self._constants.get(split.input[1]) if split is not None and split.op_type == "Reshape" else None
        ones, zeros = (self._constants.get(name) for name in node.input[1:])
        if split is None or target is None or target.tolist() != [0, groups, -1] or ones is None or zeros is None:
            return None
        if (ones != 1).any() or (zeros != 0).any() or attributes_of(split).get("allowzero", 0):
            return None
        x = split.input[0]
        dims, back = self._dims.get(x), self._reader(node.output[0], "Reshape")
        if dims is None or len(dims) < 2 or not isinstance(dims[1], int) or dims[1] % groups:
            return None
        if back is None or not self._is_shape_of(back, x):
            return None
        names = [x]
        for operator in ("Mul", "Add"):
            place = self._reader(back.output[0], operator)
            if place is None or len(set(place.input)) != 2:
                return None
            (vector,) = (name for name in place.input if name != back.output[0])
            if not self._is_per_channel(vector, x):
                return None
            names.append(vector)
            back = place
        return back, names[0], names[1], names[2]

    def _reader(self, value: str, operator: str) -> onnx.NodeProto | None:
        """The only reader of the value, if it has this operator."""
        readers = self._readers.get(value, [])
        if len(readers) != 1 or value in self._outputs:
            return None
        node = readers[0][0]
        return node if node.op_type == operator and node.domain == "" else None

    def _is_shape_of(self, reshape: onnx.NodeProto, x: str) -> bool:
        """Whether the node restores the shape of `x`, which has as many elements."""
        maker = self._makers.get(reshape.input[1])
        if maker is not None and maker.op_type == "Shape" and maker.input[0] == x:
            return not attributes_of(maker).get("start", 0) and "end" not in attributes_of(maker)
        output_dims, dims = self._dims.get(reshape.output[0]), self._dims.get(x)
        return output_dims is not None and output_dims == dims and None not in output_dims

    def _is_per_channel(self, vector: str, x: str) -> bool:
        """Whether the value has one element per channel of `x` and is broadcast over its other axes."""
        dims, sizes = self._dims.get(x), self._dims.get(vector)
        if dims is None or sizes is None or len(dims) < 2 or not isinstance(dims[1], int):
            return False
        spread = (dims[1], *[1] * (len(dims) - 2))
        return sizes in (spread, (1, *spread))


def _is_single(element: int) -> bool:
    return element == int(TensorProto.FLOAT)
