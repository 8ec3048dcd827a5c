"""Graphs of GPUs that hold parameters only while they use them: gathered a layer ahead, gradients reduced beside. Pure.

As with the nodes of `fetch_nodes`, a parameter is not an input of the rewritten graph. ShardsBegin of a visit allocates
its parameters and begins their gather on a second stream, where the visit before it begins; ShardsReady lets what
follows wait for them. Their readers read what ShardsReady makes, so that none can run before it, and ONNX Runtime frees
the memory after the last of them. ShardsSend begins to reduce the gradients of a layer. The next ShardsSend reads them
once more, and waits for their reduction: until then ONNX Runtime keeps their memory. The operators are in
`ortflow.workflow.cuda.shards`; ShardsBegin and ShardsSend form a chain, so that every rank runs them in the same order.

A parameter that a graph in half precision reads only rounded is gathered rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import attributes_of, import_domain, replace
from ortflow.workflow.graph.rules.precision import HALVES
from ortflow.workflow.graph.shards.fetch_nodes import TOKEN, Rewrite, fetched_name, rename, sizes_as_constants
from ortflow.workflow.graph.shards.layer_groups import Layer
from ortflow.workflow.graph.shards.program import GRADIENT, Fetch, Program, Send, Shape
from ortflow.workflow.graph.shards.visits import Visit

BEGIN, READY, SEND = "ShardsBegin", "ShardsReady", "ShardsSend"
MOST = 30
"""Tensors of a node: operators.c passes 64 values, and ShardsSend reads two sets of gradients."""
REAL = HALVES | {int(TensorProto.FLOAT)}
NOTHING = -1
"""Number of a step that there is not."""


def with_gathers(
    model: onnx.ModelProto, layers: Sequence[Layer], shapes: Mapping[str, Shape], channel: int
) -> tuple[onnx.ModelProto, Program]:
    """Rewrite a graph; parameters and results are those of `fetch_nodes.with_exchange`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sizes_as_constants(copy.graph, shapes)
    kinds = narrowed(copy.graph, shapes)
    program = _Ahead(copy.graph, layers, shapes, channel, kinds).run()
    import_domain(copy, CUDA_DOMAIN)
    return copy, program


def narrowed(graph: onnx.GraphProto, shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Let the readers of parameters that are only read rounded read them so, in place; the element type of each."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in sorted(walk.inputs(node)):
            if name in shapes:
                readers.setdefault(name, []).append(node)
    outputs = {value.name for value in graph.output}
    kinds: dict[str, int] = {}
    names: dict[str, str] = {}
    for name, nodes in readers.items():
        element_types = {int(attributes_of(node)["to"]) if _is_cast(node) else NOTHING for node in nodes}
        if len(element_types) == 1 and element_types <= HALVES and not any(node.output[0] in outputs for node in nodes):
            (kinds[name],) = element_types
            names.update((str(node.output[0]), name) for node in nodes)
    replace(graph.node, [node for node in graph.node if node.output[0] not in names])
    for node in graph.node:
        rename(node, names)
    return kinds


def _is_cast(node: onnx.NodeProto) -> bool:
    return node.op_type == "Cast" and not node.domain


class _Ahead(Rewrite):
    """See the module."""

    def __init__(
        self,
        graph: onnx.GraphProto,
        layers: Sequence[Layer],
        shapes: Mapping[str, Shape],
        channel: int,
        kinds: Mapping[str, int],
    ) -> None:
        super().__init__(graph, layers, shapes, channel)
        self._kinds = kinds
        self._order = [
            visit
            for place in sorted(self._visits)
            for visit in dict.fromkeys(self._visits[place].values())
            if visit.first == place
        ]
        """Visits in the order in which their parameters are needed."""
        self._begun = 0
        self._numbers: dict[Visit, list[int]] = {}
        self._sent: tuple[int, tuple[str, ...]] = NOTHING, ()
        """The last step that sends, and its gradients, which are kept until the next one."""

    def _fetch(self, visit: Visit, reader: onnx.NodeProto) -> None:
        ahead = self._order.index(visit) + 2
        trigger = self._trigger(reader)
        for upcoming in self._order[self._begun : ahead]:
            self._begin(upcoming, trigger)
        self._begun = max(self._begun, ahead)
        for number in self._numbers[visit]:
            tensors = self._program[number].tensors
            outputs = [fetched_name(name, visit.number) for name in tensors]
            self._add(READY, [_arriving(name, number) for name in tensors], outputs, number)
            for name, value in zip(tensors, outputs, strict=True):
                self._describe(value, self._kind(name), self._shapes[name])

    def _trigger(self, reader: onnx.NodeProto) -> list[str]:
        """As in `fetch_nodes`, of values in the GPU's memory: sizes are on the host."""
        kinds_of_values = {
            name: self._types[name].type.tensor_type.elem_type for name in self._places if name in self._types
        }
        read = [name for name in walk.inputs(reader) if name not in self._derived and kinds_of_values.get(name) in REAL]
        if not read and self._nodes:
            read = [name for name in self._nodes[-1].output if kinds_of_values.get(name) in REAL]
        return [max(read, key=lambda name: (self._places[name], name))] if read else []

    def _begin(self, visit: Visit, trigger: Sequence[str]) -> None:
        visit.number = len(self._program)
        self._numbers[visit] = []
        for tensors in _parts(tuple(visit.tensors)):
            number, token = len(self._program), self._token
            self._program.append(Fetch(tensors, tuple(self._kind(name) for name in tensors)))
            self._numbers[visit].append(number)
            outputs = [_arriving(name, number) for name in tensors]
            dims = [size for name in tensors for size in (len(self._shapes[name]), *self._shapes[name])]
            self._describe(self._token, TensorProto.FLOAT, (1,))
            self._add(BEGIN, [token, *trigger], [self._token, *outputs], number, dims=dims)
            for name, value in zip(tensors, outputs, strict=True):
                self._describe(value, self._kind(name), self._shapes[name])

    def _send(self, send: Send) -> None:
        for tensors in _parts(send.tensors):
            number, token = len(self._program), self._token
            self._program.append(Send(tensors))
            sent_before, before = self._sent
            gradients = tuple(f"{name}{GRADIENT}" for name in tensors)
            for name, value in zip(tensors, gradients, strict=True):
                self._describe(value, TensorProto.FLOAT, self._shapes[name])
            self._describe(self._token, TensorProto.FLOAT, (1,))
            inputs = [token, *gradients, *before]
            self._add(SEND, inputs, [self._token], number, given=len(gradients), held=sent_before)
            self._sent = number, gradients

    def _finish(self) -> None:
        """The gradients that were sent last are kept until they have been reduced, too."""
        sent_before, before = self._sent
        self._add(SEND, [self._token, *before], [self._end], NOTHING, given=0, held=sent_before)

    @property
    def _end(self) -> str:
        return f"{TOKEN}.end"

    def _kind(self, name: str) -> int:
        return self._kinds.get(name, int(TensorProto.FLOAT))

    def _describe(self, name: str, kind: int, shape: Shape) -> None:
        self._graph.value_info.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def _add(
        self, operator: str, reads: Sequence[str], makes: Sequence[str], number: int, **attributes: int | list[int]
    ) -> None:
        self._nodes.append(
            helper.make_node(
                operator, list(reads), list(makes), f"ortflow.shards.{operator}.{number}", domain=CUDA_DOMAIN,
                channel=self._channel, number=number, **attributes,
            )
        )  # fmt: skip


def _arriving(name: str, number: int) -> str:
    return f"{name}/arriving.{number}"


def _parts(tensors: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for start in range(0, len(tensors), MOST):
        yield tuple(tensors[start : start + MOST])
