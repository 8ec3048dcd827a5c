"""Converts the training graph to half precision: chooses the values to store as fp16 or bf16. Pure.

Matrix products read and write halves; sums over ranks of what they write add halves, and gathers move what is stored as
halves. Elementwise groups compute in fp32; large values that a group passes to another group or a product are stored as
half. Nodes that only move data keep the type of their input. Everything else is fp32: parameters, reductions,
statistics, losses, graph outputs, values that become indices (`positions.py`), and values that depend on no parameter,
such as the angles of rotary embeddings.
Called by step `configure` for GPU runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.fusion.groups import Dims, Group, groups_of
from ortflow.workflow.fusion.positions import positions
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.ir.edit import described, dims_of
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.graph.operators.families import HALF_PRODUCTS, Trait, having

HALVES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
"""`train.precision` -> element type."""
MOVERS = having(Trait.MOVES)
SIZES = {"Shape", "Size"}
"""Operators that do not read the numbers."""
_SUMS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
LARGE = 1 << 14
"""Values with at least this many elements are stored as half."""

Capable = Mapping[str, tuple[frozenset[int], frozenset[int]]]
"""Operator of `ortflow.cuda` -> its inputs, and its outputs, that may be half."""


def half(
    model: onnx.ModelProto, kind: int, parameters: Collection[str], capable: Capable, half_only: Collection[str] = ()
) -> onnx.ModelProto:
    """Return a copy of a training graph that computes in half precision.

    Parameters
    ----------
    model
        The training graph; its inputs and outputs keep their types.
    kind
        Element type of halves.
    parameters
        Inputs that are trained.
    capable
        Operator of `ortflow.cuda` -> positions of the inputs and outputs that may be half.
    half_only
        Operators of `capable` that support only halves.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sort_nodes(copy.graph)
    _Pass(copy, kind, parameters, capable, half_only).run()
    return copy


class _Pass:
    def __init__(
        self,
        model: onnx.ModelProto,
        kind: int,
        parameters: Collection[str],
        capable: Capable,
        half_only: Collection[str],
    ) -> None:
        self._graph, self._kind, self._capable, self._half_only = model.graph, kind, capable, half_only
        self._nodes = list(model.graph.node)
        self._types = element_types(model)
        self._dims = {name: dims_of(value) for name, value in described(self._graph).items()}
        self._products = {operator for operator, kinds in HALF_PRODUCTS.items() if kind in kinds}
        self._trained = _descendants(self._nodes, parameters)
        self._group: dict[str, Group] = {}
        """Value -> the group that computes it."""
        self._group_of: dict[int, Group] = {}
        for group in groups_of(model, self._types):
            for place in group.members:
                self._group_of[place] = group
                self._group[self._nodes[place].output[0]] = group
        operators = {name for _, name in self._products}
        self._positions = positions(self._nodes, self._types, operators | MOVERS)
        self._outputs = dict.fromkeys(str(value.name) for value in self._graph.output)
        self._makers = {name: node for node in self._nodes for name in node.output if name}
        self._crosses = self._crossing()
        self._written: list[onnx.NodeProto] = []
        self._half: dict[str, str] = {}
        """Value -> its half, if there is one."""
        self._native: set[str] = set()
        """Values that are computed as half; an fp32 copy exists only if a node needs it."""
        self._stored = set(self._crosses)
        """Values that are stored as half; nodes that can read halves do."""
        self._single: dict[tuple[str, int], str] = {}

    def run(self) -> None:
        """Rewrite the graph."""
        for place, node in enumerate(self._nodes):
            self._put(place, node)
        for name in self._outputs:
            self._plain(name)
        del self._graph.node[:]
        self._graph.node.extend(self._written)
        sort_nodes(self._graph)
        prune(self._graph)

    def _put(self, place: int, node: onnx.NodeProto) -> None:
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        self._written.append(copy)
        group = self._group_of.get(place)
        for name in sorted(walk.inputs(node).difference(node.input)):
            self._plain(name)
        if self._is_product(node):
            self._inputs(copy, range(len(node.input)))
            self._make(copy, range(len(node.output)))
        elif node.domain == CUDA_DOMAIN and node.op_type in self._capable:
            takes, gives = self._capable[node.op_type]
            half_only = node.op_type in self._half_only
            inputs, outputs = node.input, node.output
            self._inputs(copy, [i for i in takes if i < len(inputs) and (half_only or inputs[i] in self._stored)])
            # What the graph gives back is fp32: no rounding and no Cast behind it.
            halves = [
                i for i in gives if i < len(outputs) and self._is_large(outputs[i]) and outputs[i] not in self._outputs
            ]
            self._make(copy, [i for i in gives if i < len(outputs)] if half_only else halves)
        elif is_collective(node) and node.input[0] in self._exchanged(node):
            # As many bytes move as the node before has written.
            self._inputs(copy, [0])
            self._make(copy, [0])
        elif not node.domain and node.op_type in SIZES:
            self._inputs(copy, [i for i, name in enumerate(node.input) if name in self._stored])
        elif self._is_mover(node) and all(name in self._stored for name in node.input if self._is_fp32(name)):
            self._inputs(copy, [i for i, name in enumerate(node.input) if self._is_fp32(name)])
            self._make(copy, range(len(node.output)))
        elif group is not None:
            for i, name in enumerate(node.input):
                # A rounded element does not equal the extreme of its row, which was found before.
                if node.op_type != "Equal" and name in self._stored and self._group.get(name) is not group:
                    copy.input[i] = self._private(name, group)
            name = node.output[0]
            if name in self._crosses:
                self._half_of(name)
        for i, name in enumerate(copy.input):
            if name in self._native:
                copy.input[i] = self._plain(name)

    def _exchanged(self, node: onnx.NodeProto) -> set[str]:
        """Values that a collective reads as halves: for sums only what a product has made, as Megatron-LM does."""
        kind = kind_of(node)
        return self._stored if kind == Kind.ALL_GATHER else self._native if kind in _SUMS else set()

    def _inputs(self, copy: onnx.NodeProto, places: Collection[int]) -> None:
        for i in places:
            if self._is_fp32(copy.input[i]):
                copy.input[i] = self._half_of(copy.input[i])

    def _make(self, copy: onnx.NodeProto, places: Collection[int]) -> None:
        """Let a node write these outputs as halves."""
        for i in places:
            name = copy.output[i]
            if name and self._is_fp32(name):
                self._native.add(name)
                self._stored.add(name)
                copy.output[i] = self._half[name] = self._described(name, f"{name}.half", self._kind)

    def _half_of(self, name: str) -> str:
        """The half of a value, created if necessary; for a transposed parameter, the parameter's half is transposed."""
        if name not in self._half:
            new = self._described(name, f"{name}.half", self._kind)
            maker = self._makers.get(name)
            if maker is not None and self._is_mover(maker) and len(maker.output) == 1 and name not in self._native:
                moved = onnx.NodeProto.FromString(maker.SerializeToString())
                moved.name, moved.output[0] = f"{maker.name or name}/half", new
                self._inputs(moved, range(len(moved.input)))
                self._written.append(moved)
            else:
                self._cast(name, new, self._kind)
            self._half[name] = new
        return self._half[name]

    def _plain(self, name: str) -> str:
        """The value in fp32 under its own name."""
        if name in self._native:
            self._native.remove(name)
            self._cast(self._half[name], name, TensorProto.FLOAT)
        return name

    def _private(self, name: str, group: Group) -> str:
        """The half converted to fp32 for one group, which converts it while reading."""
        key = name, id(group)
        if key not in self._single:
            new = f"{name}.single.{len(self._single)}"
            self._cast(self._half[name], self._described(name, new, TensorProto.FLOAT), TensorProto.FLOAT)
            self._single[key] = new
        return self._single[key]

    def _cast(self, source: str, target: str, kind: int) -> None:
        self._written.append(helper.make_node("Cast", [source], [target], f"{target}/Cast", to=kind))

    def _described(self, template: str, name: str, kind: int) -> str:
        dims = self._dims.get(template)
        self._graph.value_info.append(helper.make_tensor_value_info(name, kind, dims))
        return name

    def _is_fp32(self, name: str) -> bool:
        return bool(name) and self._types.get(name) == TensorProto.FLOAT

    def _is_product(self, node: onnx.NodeProto) -> bool:
        return (
            (node.domain, node.op_type) in self._products
            and all(self._is_fp32(name) for name in node.input if name)
            and node.output[0] in self._trained
            and node.output[0] not in self._positions
        )

    def _is_mover(self, node: onnx.NodeProto) -> bool:
        return not node.domain and node.op_type in MOVERS and self._is_fp32(node.output[0])

    def _is_large(self, name: str) -> bool:
        return is_large(self._dims.get(name))

    def _crossing(self) -> set[str]:
        """Values of groups to store as half: large, and read by other groups, products or data movement."""
        crossing = set()
        for place, node in enumerate(self._nodes):
            if node.op_type == "Equal":
                continue
            reader = self._group_of.get(place)
            gathers = is_collective(node) and kind_of(node) == Kind.ALL_GATHER
            movable = self._is_product(node) or self._is_mover(node) or gathers or reader is not None
            takes = self._capable.get(node.op_type, ((), ()))[0] if node.domain == CUDA_DOMAIN else ()
            for i, name in enumerate(node.input):
                maker = self._group.get(name)
                if maker is None or maker is reader or not (movable or i in takes):
                    continue
                if self._is_fp32(name) and name in self._trained and self._is_large(name):
                    crossing.add(name)
        return crossing.difference(self._outputs, self._positions)


def is_large(dims: Dims | None) -> bool:
    """Whether a value of these dims is stored as half."""
    # One number a row is mostly a statistic, a mean or a loss; these stay in fp32 whatever their size.
    if dims is None or len(dims) < 2 or dims[-1] == 1:
        return dims is None
    return prod(size if isinstance(size, int) else LARGE for size in dims) >= LARGE


def _descendants(nodes: Collection[onnx.NodeProto], values: Collection[str]) -> set[str]:
    """The values and everything computed from them. Nodes must be sorted."""
    descendants = set(values)
    for node in nodes:
        if not descendants.isdisjoint(walk.inputs(node)):
            descendants.update(name for name in node.output if name)
    return descendants
