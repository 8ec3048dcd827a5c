"""Finds groups of elementwise nodes that can be one kernel, and replaces each group by one node.

A group computes values of one shape: each element from the elements of its inputs at the same position, with inputs
broadcast. Called by step `configure` for GPU runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.cuda import FUSED, FUSED_SUMS
from ortflow.workflow.fusion.contraction import Contraction
from ortflow.workflow.fusion.dropout import drawn_with, is_dropout
from ortflow.workflow.fusion.source import BOOLS, CONDITIONS, FLOATS, STORED, kernel, lanes_of
from ortflow.workflow.fusion.summed import sum_in_parts, summed_output, sums_of_rows
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import constants_of, described, dims_of, import_domain
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.memory.element_types import element_types

INPUTS, OUTPUTS = 12, 6
"""Largest number of inputs, and of outputs, of a group; limited by operators.c."""

Dims = tuple[int | str | None, ...]


def fuse(model: onnx.ModelProto, *, dropouts_only: bool = False) -> tuple[onnx.ModelProto, int]:
    """Return a copy in which each group of at least two nodes is one node, and the number of fused nodes.

    A dropout is one node in any case: it has no other kernel. With `dropouts_only` all others stay as they are.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sort_nodes(copy.graph)
    constants, types = _scalars(copy.graph), element_types(copy)
    candidates = [] if dropouts_only else groups_of(copy, types)
    nodes, count, descriptions = list(copy.graph.node), 0, described(copy.graph)
    drawing = {place for place, node in enumerate(nodes) if is_dropout(node)}
    groups = [
        group for group in candidates
        if drawing & group.members or (len(group.members) > 1 and not constants.keys() >= {*group.inputs})
    ]  # fmt: skip
    for name in drawn_with(nodes):
        descriptions.setdefault(name, helper.make_tensor_value_info(name, TensorProto.INT64, [1]))
    # What has no known shape is in no group.
    lone_dropouts = sorted(drawing.difference(*(group.members for group in groups)))
    groups += [Group((), {place}, list(nodes[place].input), list(nodes[place].output)) for place in lone_dropouts]
    sums = sums_of_rows(nodes, descriptions)
    for number, group in enumerate(groups):
        members = [nodes[place] for place in sorted(group.members)]
        count += len(members)
        used = [name for name in group.inputs if name not in constants]
        scalars = {name: constants[name] for name in group.inputs if name in constants}
        shared = drawn_with(members)
        moved = [name for name in (*used, *group.outputs) if name not in shared]
        lanes = lanes_of([name for name in moved if _is_whole(descriptions.get(name), group.dims)], types)
        bits = _dependences(members, used, group.outputs)
        summed = summed_output(group.dims, used, group.outputs, bits, descriptions, sums)
        source = kernel(members, used, group.outputs, scalars, types, lanes, summed, group.places)
        outputs = [*group.outputs, *([] if summed is None else [sum_in_parts(copy.graph, group.outputs[summed], sums)])]
        fused_node = helper.make_node(
            FUSED if summed is None else FUSED_SUMS, used, outputs,
            f"{members[-1].name or members[-1].output[0]}/fused_{number}", domain=CUDA_DOMAIN, source=source,
            lanes=lanes, **bits, **({} if summed is None else {"summed": summed}),
        )  # fmt: skip
        copy.graph.node.append(fused_node)
        copy.graph.value_info.extend(
            helper.make_tensor_value_info(name, types[name], None) for name in group.outputs if name not in descriptions
        )
    gone = {place for group in groups for place in group.members}
    remaining = [node for place, node in enumerate(nodes) if place not in gone]
    fused = list(copy.graph.node)[len(nodes) :]
    # At the position of the group's last node, so that the order of the remaining nodes is kept.
    ends = {max(group.members): fused_node for group, fused_node in zip(groups, fused, strict=True)}
    order = [ends.get(place) if place in gone else node for place, node in enumerate(nodes)]
    final = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order if node is not None]
    assert len(final) == len(remaining) + len(groups)
    del copy.graph.node[:]
    copy.graph.node.extend(final)
    sort_nodes(copy.graph)
    prune(copy.graph)
    import_domain(copy, CUDA_DOMAIN)
    return copy, count


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """The copy that `fuse` returns."""
    return fuse(model)[0]


def groups_of(model: onnx.ModelProto, types: Mapping[str, int]) -> list[Group]:
    """All groups, including those of one node; `types` are the values' element types. Nodes must be sorted."""
    return _Finder(model, types).groups()


def _is_whole(value: onnx.ValueInfoProto | None, dims: Dims) -> bool:
    """Whether a value has as many axes as a group, as far as known, and not one element only: most of what it moves."""
    value_dims = dims_of(value) if value is not None else None
    return value_dims is None or (len(value_dims) == len(dims) and any(size != 1 for size in value_dims))


def _dependences(members: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]) -> dict[str, int]:
    """For each output a bit mask of the inputs it depends on, as attributes; 0 for absent outputs."""
    shared = drawn_with(members)
    bits = {name: 0 if name in shared else 1 << place for place, name in enumerate(inputs)}
    for node in members:
        bits[node.output[0]] = 0
        for name in node.input:
            bits[node.output[0]] |= bits.get(name, 0)
    masks = [bits[name] for name in outputs]
    return {f"inputs_of_{place}": masks[place] if place < len(masks) else 0 for place in range(OUTPUTS)}


@dataclass(eq=False)
class Group:
    """Nodes by their positions in the graph's list."""

    dims: Dims
    members: set[int] = field(default_factory=set)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    """See `source.kernel`."""

    @property
    def last(self) -> int:
        """Position of its last node."""
        return max(self.members)


class _Finder:
    def __init__(self, model: onnx.ModelProto, types: Mapping[str, int]) -> None:
        graph = model.graph
        self._nodes = list(graph.node)
        self._types = types
        self._dims: dict[str, Dims | None] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._dims |= {name: dims_of(value) for name, value in described(graph).items()}
        self._makers = {name: place for place, node in enumerate(self._nodes) for name in node.output if name}
        self._readers: dict[str, list[int]] = {}
        for place, node in enumerate(self._nodes):
            for name in walk.inputs(node):
                self._readers.setdefault(name, []).append(place)
        before = [{self._makers[name] for name in walk.inputs(node) if name in self._makers} for node in self._nodes]
        self._contraction = Contraction(before)
        self._outputs = {value.name for value in graph.output}
        self._scalars = _scalars(graph)
        self._of: dict[int, Group] = {}
        self._equal_sizes: dict[str, int | str] = {}
        for node in self._nodes:
            if _is_elementwise(node):
                self._liken(node)

    def _liken(self, node: onnx.NodeProto) -> None:
        """Treat sizes that meet in a node as equal, unless they are 1.

        They may be 1 in a run; a kernel is still correct then, only slower.
        """
        shapes = [dims for name in (*node.input, *node.output) if (dims := self._dims.get(name)) is not None]
        for axis in range(1, max(map(len, shapes), default=0) + 1):
            met = [self._size(dims[-axis]) for dims in shapes if axis <= len(dims)]
            names = [size for size in met if isinstance(size, str)]
            numbers = {size for size in met if isinstance(size, int) and size != 1}
            if not names or len(numbers) > 1:
                continue
            common = next(iter(numbers), names[0])
            self._equal_sizes |= {name: common for name in names if name != common}

    def _size(self, size: int | str | None) -> int | str | None:
        while isinstance(size, str) and size in self._equal_sizes:
            size = self._equal_sizes[size]
        return size

    def groups(self) -> list[Group]:
        """The largest groups that a single pass finds; every node is in at most one."""
        for place, node in enumerate(self._nodes):
            dims = self._shape(node)
            if dims is None:
                continue
            group = Group(dims, {place})
            for other in () if self._reads_half(node) else self._neighbours(node, dims):
                joined = {*group.members, *other.members}
                ends = other.last, place
                if other is not group and self._fits(joined) and not self._contraction.encloses(*ends):
                    group = Group(dims, joined)
                    self._contraction.join(*ends)
            for member in group.members:
                self._of[member] = group
        groups = {id(group): group for group in self._of.values()}.values()
        return [self._described(group) for group in groups if self._is_closed(group)]

    def _shape(self, node: onnx.NodeProto) -> Dims | None:
        """The shape of a node's result; None if the node cannot be in a group."""
        if not _is_elementwise(node) or len(node.output) != 1:
            return None
        if not (self._is_cast(node) if node.op_type == "Cast" else is_dropout(node) or self._is_single(node)):
            return None
        dims = self._dims.get(node.output[0])
        read = [self._dims.get(value) for value in node.input if value not in self._scalars]
        # A constant of high rank may determine the rank of the result, which a group cannot represent.
        if dims is None or None in dims or None in read or len(dims) != max((len(d) for d in read if d), default=0):
            return None
        return tuple(map(self._size, dims))

    def _is_single(self, node: onnx.NodeProto) -> bool:
        """Whether it computes in fp32, with conditions that are computed inside the group."""
        conditions = CONDITIONS.get(node.op_type, ())
        for place, value in enumerate(node.input):
            expected = TensorProto.BOOL if place in conditions else TensorProto.FLOAT
            if self._type(value) != expected or (expected == TensorProto.BOOL and not self._is_inside(value)):
                return False
        return self._type(node.output[0]) == int(TensorProto.FLOAT if node.op_type in FLOATS else TensorProto.BOOL)

    def _is_cast(self, node: onnx.NodeProto) -> bool:
        """Whether it converts a condition to fp32, or any number to another type."""
        source, target = self._type(node.input[0]), self._type(node.output[0])
        if source == TensorProto.BOOL:
            return target == TensorProto.FLOAT and self._is_inside(node.input[0])
        return source in STORED and target in STORED

    def _reads_half(self, node: onnx.NodeProto) -> bool:
        """Whether it converts a half to fp32. Fused with its reader this is free; fused with its producer, fp32 would
        be stored.
        """
        return node.op_type == "Cast" and self._type(node.input[0]) in (TensorProto.FLOAT16, TensorProto.BFLOAT16)

    def _type(self, name: str) -> int:
        return int(TensorProto.FLOAT if name in self._scalars else self._types.get(name, TensorProto.UNDEFINED))

    def _is_inside(self, name: str) -> bool:
        return name in self._makers and self._nodes[self._makers[name]].op_type in BOOLS

    def _neighbours(self, node: onnx.NodeProto, dims: Dims) -> Iterable[Group]:
        groups: dict[int, Group] = {}
        for name in node.input:
            group = self._of.get(self._makers.get(name, -1))
            if group is not None and group.dims == dims:
                groups[id(group)] = group
        return groups.values()

    def _fits(self, members: Collection[int]) -> bool:
        inputs, outputs = self._ends(members)
        few = sum(name not in self._scalars for name in inputs) <= INPUTS and len(outputs) <= OUTPUTS
        return few and self._places(members) is not None

    def _places(self, members: Collection[int]) -> dict[str, str] | None:
        """For each dropout an input or output of its shape; none where all values have one; None if one is missing.

        The place of an element determines its random word. Sizes that were only likened may be 1 in a run, and then the
        group has more elements than the dropout.
        """
        dropouts = [self._nodes[place].output[0] for place in members if is_dropout(self._nodes[place])]
        if not dropouts or len({self._dims[self._nodes[place].output[0]] for place in members}) == 1:
            return {}
        inputs, outputs = self._ends(members)
        ends = {self._dims.get(name): name for name in (*inputs, *outputs) if name not in self._scalars}
        operands = {name: ends[self._dims[name]] for name in dropouts if self._dims[name] in ends}
        return operands if len(operands) == len(dropouts) else None

    def _ends(self, members: Collection[int]) -> tuple[list[str], list[str]]:
        """Values that the nodes read from outside, and values of theirs that are read outside."""
        inside = {self._nodes[place].output[0] for place in members}
        inputs = {name: None for place in sorted(members) for name in self._nodes[place].input if name not in inside}
        outputs = [
            name
            for name in (self._nodes[place].output[0] for place in sorted(members))
            if name in self._outputs or any(reader not in members for reader in self._readers.get(name, ()))
        ]
        return list(inputs), outputs

    def _is_closed(self, group: Group) -> bool:
        """Whether no condition enters or leaves the group, only numbers."""
        inputs, outputs = self._ends(group.members)
        shared = drawn_with([self._nodes[place] for place in group.members])
        return all(self._type(name) in STORED for name in (*inputs, *outputs) if name not in shared)

    def _described(self, group: Group) -> Group:
        group.inputs, group.outputs = self._ends(group.members)
        group.places = self._places(group.members) or {}
        return group


def _is_elementwise(node: onnx.NodeProto) -> bool:
    supported = node.op_type in FLOATS or node.op_type in BOOLS or node.op_type == "Cast"
    return is_dropout(node) or (not node.domain and supported)


def _scalars(graph: onnx.GraphProto) -> Mapping[str, float]:
    """fp32 constants with one element."""
    return {
        name: float(array.reshape(-1)[0])
        for name, array in constants_of(graph).items()
        if array.dtype == np.float32 and array.size == 1
    }
