"""A graph whose nodes are being replaced, with an index of the producer and readers of each value.

Used by the modules that insert this package's operators into a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of, constants_of, described, dims_of, replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.ir.writer import Writer

MOST_AXES = 8
"""As in node.h."""
Dims = tuple[int | str | None, ...]


class Rewriter(Writer):
    """Nodes are removed and added; `finish` writes them back, sorted."""

    _standard = None

    def __init__(self, graph: onnx.GraphProto, domain: str = CPU_DOMAIN) -> None:
        super().__init__(graph)
        self._domain = domain
        self._values = constants_of(graph)
        self._described = described(graph)
        self.outputs = [str(value.name) for value in graph.output]
        self._nodes: dict[int, onnx.NodeProto] = {}
        self._makers: dict[str, onnx.NodeProto] = {}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            self._enter(node)

    def _enter(self, node: onnx.NodeProto) -> None:
        self._nodes[id(node)] = node
        for name in node.output:
            self._makers[name] = node
        for name in walk.inputs(node):
            self._readers.setdefault(name, []).append(node)

    def nodes(self, operator: str, domain: str = "") -> list[onnx.NodeProto]:
        """The current nodes of an operator."""
        return [node for node in self._nodes.values() if node.op_type == operator and node.domain == domain]

    def all_nodes(self) -> list[onnx.NodeProto]:
        """All current nodes."""
        return list(self._nodes.values())

    def maker(self, value: str) -> onnx.NodeProto | None:
        """The node that produces the value."""
        return self._makers.get(value)

    def made_by(self, value: str, operator: str) -> onnx.NodeProto | None:
        """The node that produces the value, if it is one of an operator of ONNX."""
        node = self.maker(value)
        return node if node is not None and node.op_type == operator and not node.domain else None

    def is_read(self, value: str) -> bool:
        """Whether a node reads the value, or it is an output of the graph."""
        return bool(self._readers.get(value)) or value in self.outputs

    def only_reader(self, value: str) -> onnx.NodeProto | None:
        """The only reader of the value; None if there are others or it is an output of the graph."""
        readers = self._readers.get(value, [])
        return readers[0] if len(readers) == 1 and value not in self.outputs else None

    def made_for(self, reader: onnx.NodeProto, value: str, operator: str) -> onnx.NodeProto | None:
        """The node of an operator of ONNX that makes a value which only `reader` reads."""
        return self.made_by(value, operator) if self.only_reader(value) is reader else None

    def are_read_by(self, value: str, nodes: Sequence[onnx.NodeProto]) -> bool:
        """Whether all readers of the value are among `nodes`, and it is not an output of the graph."""
        ids = {id(node) for node in nodes}
        return value not in self.outputs and all(id(node) in ids for node in self._readers.get(value, []))

    def readers(self, value: str) -> list[onnx.NodeProto]:
        """The nodes that read the value."""
        return set_of(self._readers.get(value, []))

    def needed_by(self, values: Sequence[str]) -> set[int]:
        """The id of each node that one of the values is computed from."""
        ids: set[int] = set()
        names = list(values)
        while names:
            node = self._makers.get(names.pop())
            if node is not None and id(node) not in ids:
                ids.add(id(node))
                names += walk.inputs(node)
        return ids

    def dims(self, value: str) -> Dims | None:
        """Shape of a value as far as it is known."""
        return dims_of(self._described[value]) if value in self._described else None

    def is_fp32(self, value: str) -> bool:
        """Whether the value is known to be fp32."""
        return self.element(value) == int(onnx.TensorProto.FLOAT)

    def is_int64(self, value: str) -> bool:
        """Whether the value is known to be int64."""
        return self.element(value) == int(onnx.TensorProto.INT64)

    def fits(self, value: str) -> bool:
        """Whether the value is known to be fp32 with at least one axis, and no more axes than the kernels support."""
        dims = self.dims(value)
        return self.is_fp32(value) and dims is not None and 1 <= len(dims) <= MOST_AXES

    def element(self, value: str) -> int:
        """Element type of a value, UNDEFINED if it is not known."""
        description = self._described.get(value)
        return int(description.type.tensor_type.elem_type if description is not None else onnx.TensorProto.UNDEFINED)

    def number(self, value: str, other: str) -> float | None:
        """The element of a constant with a single element, whose rank does not exceed that of `other`."""
        array, dims = self._values.get(value), self.dims(other)
        if array is None or array.size != 1 or array.ndim > (len(dims) if dims is not None else 0):
            return None
        return float(array.reshape(-1)[0])

    def value(self, name: str) -> np.ndarray[Any, Any] | None:
        """The value of a constant; None for other values."""
        return self._values.get(name)

    def integers(self, value: str) -> list[int] | None:
        """The elements of an integer constant."""
        array = self._values.get(value)
        return None if array is None else [int(element) for element in array.reshape(-1)]

    def drop(self, *nodes: onnx.NodeProto) -> None:
        """Remove nodes."""
        for node in nodes:
            del self._nodes[id(node)]
            for name in node.output:
                if self._makers.get(name) is node:
                    del self._makers[name]
            for name in walk.inputs(node):
                self._readers[name].remove(node)

    def add(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
        """Add a node of the rewriter's domain. The previous producer of its outputs must be removed first."""
        self.write(operator, inputs, outputs, self._domain, **attributes)
        return self._makers[outputs[0]]

    def describe(self, value: str, element: int, dims: Dims | None) -> None:
        """Record a value's element type (of onnx.TensorProto) and, if known, its shape; a known shape is kept."""
        if value not in self._described:
            self._described[value] = helper.make_tensor_value_info(value, element, dims)
            self.graph.value_info.append(self._described[value])

    def describe_like(self, value: str, other: str) -> None:
        """Describe a value by the shape of another that is known to be equal."""
        if value in self.outputs:
            return
        for stale in [description for description in self.graph.value_info if description.name == value]:
            self.graph.value_info.remove(stale)
        # ONNX Runtime lets a node write over its input only if both have the same names of axes.
        described = self.graph.value_info.add()
        described.CopyFrom(self._described[other])
        described.name = value
        self._described[value] = described

    def ints(self, *values: int) -> str:
        """An int64 vector constant; equal values share one."""
        name = "ortflow.kernels." + "_".join(map(str, values))
        if name not in self._values:
            self._values[name] = np.array(values, np.int64)
            self.graph.initializer.append(numpy_helper.from_array(self._values[name], name))
        return name

    def repeat(self, node: onnx.NodeProto, renamed: Mapping[str, str] | None = None) -> str:
        """Repeat a node with one output, with renamed inputs; returns the new value's name."""
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name, old = f"{node.name}/again", node.output[0]
        copy.output[:] = [f"{old}.again"]
        copy.input[:] = [(renamed or {}).get(name, name) for name in node.input]
        if old in self._described:
            described = onnx.ValueInfoProto()
            described.CopyFrom(self._described[old])
            described.name = copy.output[0]
            self._described[described.name] = described
            self.graph.value_info.append(described)
        self._enter(copy)
        return str(copy.output[0])

    def redirect(self, node: onnx.NodeProto, old: str, new: str) -> None:
        """Replace one input of a node by another."""
        self._readers[old].remove(node)
        self._readers.setdefault(new, []).append(node)
        node.input[:] = [new if name == old else name for name in node.input]

    def pass_by(self, node: onnx.NodeProto) -> bool:
        """Let all readers of a node's only output read its first input; False if that would rename an output."""
        old, new = node.output[0], node.input[0]
        readers = self._readers.get(old, [])
        if old in self.outputs or any(place == old for n in readers for place in walk.inputs(n) - set(n.input)):
            return False
        for reader in set_of(readers):
            for place, name in enumerate(reader.input):
                if name == old:
                    reader.input[place] = new
            self._readers.setdefault(new, []).append(reader)
        self._readers[old] = []
        self.drop(node)
        return True

    def finish(self) -> None:
        """Write the nodes back into the graph."""
        replace(self.graph.node, list(self._nodes.values()))
        sort_nodes(self.graph)
        prune(self.graph)


def set_of(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Each node once; protobuf messages are not hashable."""
    return list({id(node): node for node in nodes}.values())


def is_last_axis(node: onnx.NodeProto, dims: Dims | None) -> bool:
    """Whether the node works on the last axis of a value of these dims."""
    axis = attributes_of(node).get("axis", -1)
    return axis == -1 or (dims is not None and axis == len(dims) - 1)


def width_of(dims: Dims | None) -> int | None:
    """Length of the last axis, if it is a number."""
    return dims[-1] if dims and isinstance(dims[-1], int) else None
