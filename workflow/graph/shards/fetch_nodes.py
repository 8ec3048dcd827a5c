"""Nodes that fetch parameters when a graph needs them, and send gradients when they are complete. Pure.

A parameter is not an input of the rewritten graph. It is an output of a node `Shards` (`workflow/kernels/shards.c`)
placed where the parameter is read, and ONNX Runtime frees it after its last reader. Later readers, such as those in the
backward pass, have their own node. All these nodes form a chain, so that every rank runs them in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import described, import_domain, replace
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.shards.layer_groups import Layer
from ortflow.workflow.graph.shards.program import GRADIENT, Fetch, Program, Send, Shape
from ortflow.workflow.graph.shards.visits import Visit, derived_nodes, visits_of

OPERATOR = "Shards"
TOKEN, LAST_TOKEN = "ortflow.token", "ortflow.token.last"
"""Input and output, fp32 [1]: the two ends of the chain."""


def with_exchange(
    model: onnx.ModelProto, layers: Sequence[Layer], shapes: Mapping[str, Shape], channel: int
) -> tuple[onnx.ModelProto, Program]:
    """Rewrite a training or evaluation graph to fetch the parameters of `layers` and send their gradients.

    Parameters
    ----------
    model
        Its nodes are sorted. Gradients are its outputs `NAME_grad`.
    shapes
        Shapes of the parameters.
    channel
        Identifies the graph to the listener.

    Returns
    -------
    tuple
        The rewritten copy, and the program of its nodes.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sizes_as_constants(copy.graph, shapes)
    program = Rewrite(copy.graph, layers, shapes, channel).run()
    import_domain(copy, CPU_DOMAIN)
    return copy, program


def sizes_as_constants(graph: onnx.GraphProto, shapes: Mapping[str, Shape]) -> None:
    """Replace the shapes and sizes of parameters by constants, in place, so that reading them needs no fetch."""
    outputs, nodes = {value.name for value in graph.output}, []
    for node in graph.node:
        shape = shapes.get(node.input[0]) if node.op_type in ("Shape", "Size") and not node.domain else None
        if shape is None or node.output[0] in outputs:
            nodes.append(node)
            continue
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        value = (
            np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], np.int64)
            if node.op_type == "Shape"
            else np.array(np.prod(shape, dtype=np.int64), np.int64)
        )
        graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    replace(graph.node, nodes)


class Rewrite:
    """Rewrites one graph, node by node. Extended by `ahead` for GPUs."""

    def __init__(
        self, graph: onnx.GraphProto, layers: Sequence[Layer], shapes: Mapping[str, Shape], channel: int
    ) -> None:
        self._graph, self._shapes, self._channel = graph, shapes, channel
        self._derived = derived_nodes(graph, shapes)
        self._visits = visits_of(graph, layers, self._derived)
        self._sends = _sends(graph, layers)
        self._types = described(graph)
        self._places = {name: place for place, node in enumerate(graph.node) for name in node.output if name}
        self._initializers = {tensor.name for tensor in graph.initializer}
        self._nodes: list[onnx.NodeProto] = []
        self._copies: dict[tuple[str, tuple[int, ...]], str] = {}
        self._program: list[Fetch | Send] = []

    def run(self) -> Program:
        graph = self._graph
        parameters = set(self._shapes)
        for place, node in enumerate(graph.node):
            if node.output[0] in self._derived:
                continue
            used = self._visits.get(place, {})
            for visit in dict.fromkeys(used.values()):
                if visit.first == place:
                    self._fetch(visit, node)
            fetched = [name for name in walk.inputs(node) if name in parameters or name in self._derived]
            names = {name: self._local(name, used) for name in sorted(fetched)}
            self._nodes.append(_renamed(node, names))
            for send in self._sends.get(place, ()):
                self._send(send)
        self._finish()
        replace(graph.node, self._nodes)
        gone = {f"{name}{GRADIENT}" for name in parameters}
        token = helper.make_tensor_value_info(TOKEN, TensorProto.FLOAT, [1])
        replace(graph.input, [*(value for value in graph.input if value.name not in parameters), token])
        last = [helper.make_tensor_value_info(self._end, TensorProto.FLOAT, [1])] if self._program else []
        replace(graph.output, [*(value for value in graph.output if value.name not in gone), *last])
        prune(graph)
        return tuple(self._program)

    @property
    def _token(self) -> str:
        """What the next node of the chain reads. All are numbered, since the last one is not renamed."""
        return f"{TOKEN}.{len(self._program)}" if self._program else TOKEN

    def _fetch(self, visit: Visit, reader: onnx.NodeProto) -> None:
        visit.number = len(self._program)
        names = tuple(visit.tensors)
        outputs = [fetched_name(name, visit.number) for name in names]
        self._node(Fetch(names), self._trigger(reader), outputs)
        for name, value in zip(names, outputs, strict=True):
            self._graph.value_info.append(
                helper.make_tensor_value_info(value, TensorProto.FLOAT, list(self._shapes[name]))
            )

    def _send(self, send: Send) -> None:
        self._node(send, [f"{name}{GRADIENT}" for name in send.tensors])

    def _finish(self) -> None:
        """Called behind the last node."""

    @property
    def _end(self) -> str:
        """The end of the chain."""
        return self._token

    def _trigger(self, reader: onnx.NodeProto) -> list[str]:
        """An additional input of the first reader: of its other inputs, the one computed last. ONNX Runtime runs a node
        as early as possible, and nothing must be fetched too early.
        """
        read = [name for name in walk.inputs(reader) if name in self._places and name not in self._derived]
        if not read and self._nodes:
            before = [name for name in self._nodes[-1].output if name in self._places]
            kinds = {name: self._types[name].type.tensor_type.elem_type for name in before if name in self._types}
            read = [name for name, kind in kinds.items() if kind == TensorProto.FLOAT]
        return [max(read, key=lambda name: (self._places[name], name))] if read else []

    def _node(self, step: Fetch | Send, inputs: Sequence[str], outputs: Sequence[str] = ()) -> None:
        number, token = len(self._program), self._token
        dims = [size for name in step.tensors if outputs for size in (len(self._shapes[name]), *self._shapes[name])]
        shapes = f"ortflow.shards.{number}.shapes"
        self._graph.initializer.append(numpy_helper.from_array(np.array(dims, np.int64), shapes))
        self._program.append(step)
        self._nodes.append(
            helper.make_node(
                OPERATOR, [token, shapes, *inputs], [self._token, *outputs], f"ortflow.shards.{number}",
                domain=CPU_DOMAIN, channel=self._channel, number=number,
            )
        )  # fmt: skip

    def _local(self, name: str, used: Mapping[str, Visit]) -> str:
        """The name under which a node reads a parameter, or a value computed from parameters alone, which is computed
        again for each fetch.
        """
        if name not in self._derived:
            return fetched_name(name, used[name].number)
        node, parameters = self._derived[name]
        key = tuple(used[parameter].number for parameter in parameters)
        if (name, key) not in self._copies:
            inner = {
                read: self._local(read, used)
                for read in sorted(walk.inputs(node)) if read in self._derived or read in self._shapes
            }  # fmt: skip
            copy = _renamed(node, inner)
            suffix = f"/fetched.{'.'.join(map(str, key))}"
            copy.name = f"{node.name}{suffix}"
            for place, output in enumerate(node.output):
                if output:
                    copy.output[place] = f"{output}{suffix}"
                    self._copies[output, key] = copy.output[place]
                    if output in self._types:
                        value = onnx.ValueInfoProto.FromString(self._types[output].SerializeToString())
                        value.name = copy.output[place]
                        self._graph.value_info.append(value)
            self._nodes.append(copy)
        return self._copies[name, key]


def fetched_name(name: str, number: int) -> str:
    """The value of a parameter that fetch `number` of the program makes."""
    return f"{name}/fetched.{number}"


def _sends(graph: onnx.GraphProto, layers: Sequence[Layer]) -> dict[int, list[Send]]:
    """Index of the node after which all gradients of a layer are complete -> the send that follows."""
    gradient_names = {value.name for value in graph.output}
    places = {name: place for place, node in enumerate(graph.node) for name in node.output}
    sends: dict[int, list[Send]] = {}
    for layer in layers:
        layer_gradients = [name for name in layer.tensors if f"{name}{GRADIENT}" in gradient_names]
        if layer_gradients:
            place = max(places.get(f"{name}{GRADIENT}", len(graph.node) - 1) for name in layer_gradients)
            sends.setdefault(place, []).append(Send(tuple(layer_gradients)))
    return sends


def _renamed(node: onnx.NodeProto, names: Mapping[str, str]) -> onnx.NodeProto:
    """A copy that reads values under other names, including in its subgraphs."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    if names:
        rename(copy, names)
    return copy


def rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Let a node read values under other names, in place, including in its subgraphs."""
    for place, name in enumerate(node.input):
        node.input[place] = names.get(name, name)
    for graph in walk.subgraphs(node):
        inner_names = {value.name for value in (*graph.input, *graph.initializer)}
        outer = {name: new for name, new in names.items() if name not in inner_names}
        for inner in graph.node:
            rename(inner, outer)
        for value in graph.output:
            value.name = outer.get(value.name, value.name)
