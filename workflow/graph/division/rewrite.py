"""Makes the graph of one part from a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.division.scores import Scores
from ortflow.workflow.graph.domains import CPU_DOMAIN
from ortflow.workflow.graph.ir.collective import Kind, collective, is_collective
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, import_domain, replace
from ortflow.workflow.graph.ir.origin import inherit
from ortflow.workflow.graph.rules.cut import Cut
from ortflow.workflow.graph.rules.division_plan import Plan
from ortflow.workflow.graph.rules.facts import Facts


class PartWriter(Editor):
    """Appends the nodes of a part."""

    def __init__(self, graph: onnx.GraphProto, part: int, parts: int, channel: int) -> None:
        super().__init__(graph)
        self.made: list[onnx.NodeProto] = []
        self.part, self.parts, self.channel = part, parts, channel

    def _enter(self, node: onnx.NodeProto) -> None:
        self.made.append(node)
        self._taken.update(node.output)

    def keep(self, node: onnx.NodeProto) -> None:
        """Append a node of the undivided graph."""
        self.made.append(node)

    def reduce(self, value: str, kind: Kind = Kind.ALL_REDUCE, output: str | None = None) -> str:
        """Append a reduction of the value over the parts, a sum by default."""
        return collective(self, kind, value, self.channel, self.parts, output)

    def share(self, value: str, cut: Cut, output: str | None = None) -> str:
        """Append a slice: this part's share of an undivided value."""
        ranges = cut.region(self.part, self.parts).ranges
        axis = self.ints(cut.axis)
        if len(ranges) == 1:
            ((start, stop),) = ranges
            return self("Slice", value, self.ints(start), self.ints(stop), axis, output=output)
        pieces = [self("Slice", value, self.ints(start), self.ints(stop), axis) for start, stop in ranges]
        return self("Concat", *pieces, axis=cut.axis, output=output)

    def whole(self, value: str, cut: Cut, rank: int, output: str | None = None) -> str:
        """Append a gather of a divided value: each part fills its share of zeros, and the results are summed."""
        ranges = cut.region(self.part, self.parts).ranges
        edges, start = [], 0
        for first, stop in ranges:
            edges.append((first - start, stop - first))
            start = stop
        sizes = [size for _, size in edges]
        pieces = [value]
        if len(sizes) > 1:
            pieces = [self.fresh("Split") for _ in sizes]
            self.write("Split", [value, self.ints(*sizes)], pieces, axis=cut.axis)
        spread = []
        for number, (piece, (gap, _)) in enumerate(zip(pieces, edges, strict=True)):
            pads = [0] * (2 * rank)
            pads[cut.axis] = gap
            if number == len(edges) - 1:
                pads[rank + cut.axis] = cut.length - start
            spread.append(self("Pad", piece, self.ints(*pads)))
        joined = spread[0] if len(spread) == 1 else self("Concat", *spread, axis=cut.axis)
        return self.reduce(joined, output=output)


class Rewrite:
    """Makes the graph of a part, in place."""

    def __init__(
        self, model: onnx.ModelProto, facts: Facts, plan: Plan, cuts: Mapping[str, Cut], part: int, parts: int,
        channel: int,
    ) -> None:  # fmt: skip
        self._model, self._facts, self._plan, self._held = model, facts, plan, cuts
        self._write = PartWriter(model.graph, part, parts, channel)
        self._copied: dict[str, str] = {}
        self._shared: dict[tuple[str, Cut], str] = {}
        self._renamed: dict[str, str] = {}
        self.sums: list[str] = []
        """Values that are summed over the parts behind divided layers and look-ups."""

    def gather_tensors(self, names: Mapping[str, Cut]) -> None:
        """Gather tensors that this graph reads whole, although parts hold shares."""
        for name, cut in names.items():
            self._renamed[name] = self._write.whole(name, cut, len(self._facts.tensors[name]))

    def run(self) -> None:
        """Write all nodes."""
        graph, write = self._model.graph, self._write
        for place, old in enumerate(self._facts.nodes):
            node = onnx.NodeProto()
            node.CopyFrom(old)
            before = len(write.made)
            self._node(place, node)
            if place in self._plan.rows or place in self._plan.lookups:
                self.sums += [node_added.output[0] for node_added in write.made[before:] if is_collective(node_added)]
            inherit([node_added for node_added in write.made[before:] if node_added is not node], node)
        nodes = write.made
        replace(graph.node, nodes)
        stale = self._plan.cuts.keys() | {name for node in nodes for name in node.output}
        replace(graph.value_info, [value for value in graph.value_info if value.name not in stale])
        for value in graph.input:
            cut = self._held.get(value.name)
            if cut is not None:
                value.type.tensor_type.shape.dim[cut.axis].dim_value = cut.local(write.part, write.parts)
        import_domain(self._model, CPU_DOMAIN)

    def _node(self, place: int, node: onnx.NodeProto) -> None:
        plan, write = self._plan, self._write
        originals = list(node.input)
        for slot, name in enumerate(originals):
            if not name:
                continue
            if (place, slot) in plan.slices:
                node.input[slot] = self._share(name, plan.slices[place, slot])
            elif (place, slot) in plan.copies:
                node.input[slot] = self._copy(name)
            elif name in self._renamed:
                node.input[slot] = self._renamed[name]
            if (place, slot) in plan.sizes:
                node.input[slot] = self._sizes(node.input[slot], *plan.sizes[place, slot])
            if (place, slot) in plan.lists:
                node.input[slot] = write.ints(*(size // write.parts for size in plan.lists[place, slot]))
        # Readers of what is put together read the whole.
        shared = [name for name in originals if name in plan.cuts and name not in plan.gathered]
        cut = plan.cuts[shared[0]] if shared else None
        if node.op_type in ("Shape", "Size") and node.domain == "" and cut is not None:
            self._size(node, cut)
        elif node.op_type == "Dropout" and node.domain == "" and cut is not None:
            self._dropout(node, cut)
        elif place in plan.rows:
            self._row(node)
        elif place in plan.sums:
            output, node.output[0] = node.output[0], write.fresh("part")
            write.keep(node)
            write.reduce(node.output[0], output=output)
        elif place in plan.lookups:
            Scores(write).look_up(node, plan.lookups[place], self._facts)
        elif place in plan.normal:
            Scores(write).log_softmax(node, plan.normal[place], copied=self._is_trained(originals[0]))
        elif place in plan.entropies:
            Scores(write).cross_entropy(node, plan.entropies[place])
        else:
            write.keep(node)
        for slot, name in enumerate(node.output):
            if name in plan.gathered:
                cut = plan.gathered[name]
                node.output[slot] = write.fresh("part")
                write.whole(node.output[slot], cut, cut.axis + 1, output=name)

    def _is_trained(self, name: str) -> bool:
        return name in self._facts.trained

    def _copy(self, name: str) -> str:
        """The value, with its gradient summed over the parts."""
        source = self._renamed.get(name, name)
        if not self._is_trained(name):
            return source
        if name not in self._copied:
            self._copied[name] = self._write.reduce(source, Kind.COPY)
        return self._copied[name]

    def _share(self, name: str, cut: Cut) -> str:
        key = name, cut
        if key in self._shared:
            return self._shared[key]
        constant = self._facts.constant(name)
        if constant is not None:
            region = cut.region(self._write.part, self._write.parts)
            share_name = self._write.fresh("constant")
            # Only elements of numeric constants are changed.
            self._model.graph.initializer.append(
                numpy_helper.from_array(np.ascontiguousarray(region.of(constant)), share_name)
            )
            self._shared[key] = share_name
        else:
            self._shared[key] = self._write.share(self._copy(name), cut)
        return self._shared[key]

    def _sizes(self, name: str, axis: int, cut: Cut) -> str:
        """A list of sizes with this part's size in it, except where the list leaves the size open."""
        write = self._write
        even, listed = cut.is_even(write.parts), self._facts.constant(name)
        local = cut.local(write.part, write.parts)
        if listed is not None:
            sizes = [int(size) for size in listed]
            if axis < len(sizes) and sizes[axis] > 0:
                sizes[axis] = sizes[axis] // write.parts if even else local
            return write.ints(*sizes)
        rank = self._facts.shape(name)
        assert rank is not None
        at_axis = write.constant([place == axis for place in range(rank[0])], "bool")
        is_fixed = write("And", at_axis, write("Greater", name, write.constant(0, "int64")))
        here_local = write("Div", name, write.ints(write.parts)) if even else write.constant(local, "int64")
        return write("Where", is_fixed, here_local, name)

    def _lengths(self, listed: str, axes: Sequence[int], cut: Cut, output: str | None = None) -> str:
        """Sizes of the whole, from those of this part's share along some axes."""
        write = self._write
        at_cut = write.constant([axis == cut.axis for axis in axes], "bool")
        even = cut.is_even(write.parts)
        full_length = write("Mul", listed, write.ints(write.parts)) if even else write.constant(cut.length, "int64")
        return write("Where", at_cut, full_length, listed, output=output)

    def _size(self, node: onnx.NodeProto, cut: Cut) -> None:
        """Nodes that compute with sizes use those of the whole."""
        write, output = self._write, node.output[0]
        flags = attributes_of(node)
        if node.op_type == "Size":
            node.output[0] = write.fresh("Size")
            write.keep(node)
            if cut.is_even(write.parts):
                write("Mul", node.output[0], write.constant(write.parts, "int64"), output=output)
                return
            local = cut.local(write.part, write.parts)
            rest = write("Div", node.output[0], write.constant(local, "int64"))
            write("Mul", rest, write.constant(cut.length, "int64"), output=output)
            return
        shape = self._facts.shape(node.input[0])
        assert shape is not None
        listed = list(range(len(shape)))[slice(flags.get("start", 0), flags.get("end", len(shape)))]
        if cut.axis not in listed:
            write.keep(node)
            return
        node.output[0] = write.fresh("Shape")
        write.keep(node)
        self._lengths(node.output[0], listed, cut, output)

    def _dropout(self, node: onnx.NodeProto, cut: Cut) -> None:
        """The part's share of the mask that the undivided graph draws."""
        write = self._write
        value, output = node.input[0], node.output[0]
        shape = self._facts.shape(value)
        assert shape is not None
        lengths = write("Shape", value)
        full_shape = self._lengths(lengths, range(len(shape)), cut)
        one = numpy_helper.from_array(np.ones(1, np.float32))
        node.input[0] = write("ConstantOfShape", full_shape, value=one)
        node.output[0] = write.fresh("kept")
        mask = node.output[1] if len(node.output) > 1 else ""
        if mask:
            node.output[1] = write.fresh("mask")
        write.keep(node)
        if mask:
            write.share(node.output[1], cut, output=mask)
        # So that inference knows its shape, and gradients need no sums by shapes that are computed in the run.
        mask_share = write("Reshape", write.share(node.output[0], cut), lengths)
        write("Mul", value, mask_share, output=output)

    def _row(self, node: onnx.NodeProto) -> None:
        """The sum of the parts' products; a bias is added once."""
        write, output = self._write, node.output[0]
        bias = node.input[2] if len(node.input) > 2 else ""
        del node.input[2:]
        node.output[0] = write.fresh("part")
        write.keep(node)
        if not bias:
            write.reduce(node.output[0], output=output)
        else:
            write("Add", write.reduce(node.output[0]), bias, output=output)
