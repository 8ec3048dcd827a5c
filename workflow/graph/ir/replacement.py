"""Writes the nodes that replace one node; used by decompositions, rules and compositions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.writer import Fresh, Writer
from ortflow.workflow.graph.names import OWN

MISFITS = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)
"""Raised when a node whose attributes contradict its inputs is rewritten, as in a malicious file."""

LAST = 2**31 - 1
"""End of a slice that includes the last element."""


@dataclass(frozen=True)
class Context:
    """What a decomposition may use of the graph around its node."""

    fresh: Fresh
    types: Mapping[str, onnx.TypeProto]
    tensors: Mapping[str, onnx.TensorProto] = field(default_factory=dict)
    """Initializers and the values of Constant nodes, by name."""
    gradients: Collection[str] | None = None
    """Values between a trained parameter and the loss; None if unknown."""
    steep: Collection[str] = ()
    """Values whose gradient may be infinite (`autodiff.steep`)."""


def context_of(model: onnx.ModelProto) -> Context:
    """The context of a model's graph before there is a gradient path."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return Context(fresh_names(model.graph), shapes.value_types(model), tensors)


class Replacement(Writer):
    """Collects the nodes that replace `node` in `nodes`. Constants are nodes, too."""

    def __init__(self, node: onnx.NodeProto, context: Context) -> None:
        super().__init__(onnx.GraphProto())
        self.nodes: list[onnx.NodeProto] = []
        self.node, self.context = node, context
        self._prefix = node.name or next((name for name in node.output if name), node.op_type)

    def fresh(self, hint: str) -> str:
        """A name that begins like the replaced node's."""
        return self.context.fresh(f"{self._prefix}/{hint}")

    def _title(self, operator: str, outputs: Sequence[str]) -> str:
        return f"{self._prefix}/{operator}_{len(self.nodes)}"

    def _enter(self, node: onnx.NodeProto) -> None:
        self.nodes.append(node)

    def several(self, operator: str, count: int, *inputs: str, domain: str = "", **attributes: Any) -> list[str]:
        """A node with `count` outputs; returns their names."""
        return self.some(operator, [True] * count, *inputs, domain=domain, **attributes)

    def some(
        self, operator: str, flags: Sequence[bool], *inputs: str, domain: str = "", **attributes: Any
    ) -> list[str]:
        """A node with the outputs that are wanted; their names, empty for one that is left out."""
        outputs = [self.fresh(operator) if flag else "" for flag in flags]
        return self.write(operator, inputs, outputs, domain, **attributes)

    def constant(self, value: Any, dtype: Any = "float32") -> str:
        """A Constant node's value."""
        tensor = numpy_helper.from_array(np.array(value, dtype))
        return self.write("Constant", [], [self.fresh(OWN)], value=tensor)[0]

    def done(self, *values: str) -> list[onnx.NodeProto]:
        """The nodes, with `values` renamed to the outputs of the replaced node."""
        for value, output in zip(values, self.node.output, strict=False):
            if output:
                self.nodes.append(helper.make_node("Identity", [value], [output], f"{self._prefix}/{output}"))
        return self.nodes

    def input(self, place: int) -> str:
        """Name of an input, empty if it is omitted."""
        return str(self.node.input[place]) if place < len(self.node.input) else ""

    def output(self, place: int) -> str:
        """Name of an output, empty if it is omitted."""
        return str(self.node.output[place]) if place < len(self.node.output) else ""

    def attribute(self, name: str, default: Any) -> Any:
        """Value of an attribute of the replaced node."""
        return attribute(self.node, name, default)

    def value(self, place: int) -> np.ndarray | None:
        """Value of an input if it is constant; None otherwise, or if it is omitted."""
        tensor = self.context.tensors.get(self.input(place))
        return None if tensor is None else numpy_helper.to_array(tensor)

    def known_value(self, place: int, noun: str) -> np.ndarray:
        """Value of a constant input. Raises UserError, naming node and input, if it is not constant."""
        value = self.value(place)
        if value is None:
            raise self.refusal(f"its {noun} are not constant")
        return value

    def rank(self, place: int) -> int:
        """Rank of an input. Raises UserError, naming the node, if it is unknown."""
        rank = shapes.rank(self.context.types, self.input(place))
        if rank is None:
            raise self.refusal("the rank of its input is not known")
        return rank

    def shape(self, place: int) -> list[int | None]:
        """An input's dims, with None for unknown ones. Raises UserError if the rank is unknown."""
        self.rank(place)
        dims = shapes.shape(self.context.types, self.input(place))
        assert dims is not None
        return dims

    def refusal(self, because: str) -> UserError:
        """The error that says why there is no gradient through this node."""
        return no_gradient(self.node, because)


def no_gradient(node: onnx.NodeProto, because: str) -> UserError:
    """The error for a node without gradient between a trained parameter and the loss."""
    return UserError(
        f"{walk.called(node)} has no gradient here: {because}",
        fix="replace it in the model, or freeze every parameter before it under `model.parameters.freeze`",
    )


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """Value of an attribute (text decoded), or `default`."""
    for candidate in node.attribute:
        if candidate.name == name:
            value = helper.get_attribute_value(candidate)
            return value.decode() if isinstance(value, bytes) else value
    return default


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    """Set an attribute of a node in place; None removes it."""
    attributes = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(attributes)
    if value is not None:
        node.attribute.append(helper.make_attribute(name, value))


def copy_of(node: onnx.NodeProto) -> onnx.NodeProto:
    """A copy of the node."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy
