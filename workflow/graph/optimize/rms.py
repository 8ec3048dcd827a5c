"""Recognises root mean square normalisation in the nodes that exporters write, and replaces it by one node.

Called by `rewrites` on the training graph. `fuse` runs before it is differentiated: the gradient of the separate nodes
reads and keeps several values of the input's size, that of the fused node only the input and one number per row.
`unfuse` afterwards decomposes the nodes that no kernel of ours computes, because ONNX Runtime 1.19 adds the squares of
a row one by one.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, constants_of, described, dims_of
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.ir.origin import inherit

OPERATOR = "SimplifiedLayerNormalization"
"""ONNX Runtime's name for it, in ONNX's own domain; RMSNormalization exists only since opset 23."""

_EPSILON = 1e-5


def fuse(graph: onnx.GraphProto) -> None:
    """Replace x / sqrt(mean(x^2) + epsilon) * scale over the last axis by SimplifiedLayerNormalization, in place."""
    formula = _Formula(graph)
    is_changed = False
    for node in graph.node:
        for value, scale in formula.pairs(node, "Mul"):
            match = formula.normalised(value)
            if match is None or not formula.fits(match[0], scale) or not formula.is_read_once(value):
                continue
            x, epsilon = match
            name = node.output[0]
            fused = onnx.helper.make_node(
                OPERATOR, [x, scale], [name], name=f"{node.name}/{OPERATOR}", axis=-1, epsilon=epsilon
            )
            inherit([fused], node)
            node.CopyFrom(fused)
            is_changed = True
            break
    if is_changed:
        prune(graph)


def unfuse(graph: onnx.GraphProto) -> None:
    """Replace each such node over the last axis by ONNX operators, in place."""
    edit = Editor(graph)
    for node in list(graph.node):
        flags = attributes_of(node)
        if node.op_type != OPERATOR or node.domain != "" or flags.get("axis", -1) != -1:
            continue
        x, scale = node.input
        graph.node.remove(node)
        before = len(graph.node)
        mean = edit("ReduceMean", edit("Mul", x, x), edit.ints(-1), keepdims=1)
        root = edit("Sqrt", edit("Add", mean, edit.constant(flags.get("epsilon", _EPSILON))))
        saved_output = next((name for name in node.output[1:] if name), None)
        normal = edit("Mul", x, edit("Reciprocal", root, output=saved_output))
        edit("Mul", normal, scale, output=node.output[0])
        inherit(graph.node[before:], node)
    sort_nodes(graph)


class _Formula:
    """The producers of a graph's values."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._makers = walk.producers(graph)
        self._readers = walk.consumers(graph)
        self._outputs = {value.name for value in graph.output}
        self._constants = constants_of(graph)
        self._described = described(graph)
        self._described |= {
            t.name: onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in graph.initializer
        }

    def is_read_once(self, value: str) -> bool:
        """Whether exactly one node reads the value."""
        return value not in self._outputs and len(self._readers.get(value, [])) == 1

    def fits(self, x: str, scale: str) -> bool:
        """Whether `x` is fp32 and `scale` has one fp32 number per element of its last axis."""
        values = [self._described[name] for name in (x, scale) if name in self._described]
        if len(values) < 2 or any(v.type.tensor_type.elem_type != TensorProto.FLOAT for v in values):
            return False
        dims, sizes = (dims_of(value) for value in values)
        return bool(dims) and dims is not None and isinstance(dims[-1], int) and sizes == dims[-1:]

    def pairs(self, node: onnx.NodeProto | None, operator: str) -> Iterator[tuple[str, str]]:
        """Both orders of a node's inputs, if it has this operator."""
        if node is not None and node.op_type == operator and node.domain == "":
            yield node.input[0], node.input[1]
            yield node.input[1], node.input[0]

    def normalised(self, value: str) -> tuple[str, float] | None:
        """x and epsilon if the value is x / sqrt(mean(x^2) + epsilon)."""
        node = self._makers.get(value)
        pairs = [(x, self._under_inverse_root(root)) for x, root in self.pairs(node, "Mul")]
        if (divided := self._inputs(value, "Div")) is not None:
            pairs.append((divided[0], self._under_root(divided[1])))
        for x, inner in pairs:
            for mean, epsilon in self.pairs(self._makers.get(inner or ""), "Add"):
                number = self._number(epsilon)
                if number is not None and self._is_mean_of_squares(mean, x):
                    return x, number
        return None

    def _under_inverse_root(self, value: str) -> str | None:
        """v if the value is 1 / sqrt(v)."""
        if (inverted := self._inputs(value, "Reciprocal")) is not None:
            return self._under_root(inverted[0])
        if (divided := self._inputs(value, "Div")) is not None and self._number(divided[0]) == 1:
            return self._under_root(divided[1])
        if (raised := self._inputs(value, "Pow")) is not None and self._number(raised[1]) == -0.5:
            return raised[0]
        return None

    def _under_root(self, value: str) -> str | None:
        inputs = self._inputs(value, "Sqrt")
        return None if inputs is None else inputs[0]

    def _is_mean_of_squares(self, value: str, x: str) -> bool:
        inputs, node = self._inputs(value, "ReduceMean"), self._makers.get(value)
        if inputs is None or node is None or len(inputs) != 2 or not attributes_of(node).get("keepdims", 1):
            return False
        dims = dims_of(self._described[x]) if x in self._described else None
        axes = self._constants.get(inputs[1])
        if dims is None or axes is None or axes.tolist() not in ([-1], [len(dims) - 1]):
            return False
        raised = self._inputs(inputs[0], "Pow")
        squared = raised is not None and raised[0] == x and self._number(raised[1]) == 2
        return squared or self._inputs(inputs[0], "Mul") == [x, x]

    def _inputs(self, value: str, operator: str) -> list[str] | None:
        """The inputs of the value's producer, if it has this operator."""
        node = self._makers.get(value)
        return list(node.input) if node is not None and node.op_type == operator and node.domain == "" else None

    def _number(self, value: str) -> float | None:
        """The element of a constant with one element."""
        array = self._constants.get(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None
