"""Rule for Loop and Scan.

The gradient is a Scan over the iterations, from the last to the first. Each iteration computes the forward values that
it needs again, from its states, of which the forward node keeps those that are needed as a further output. The
gradients of captured values are sums over the iterations. Peak memory is that of the kept states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.autodiff.branches import check_repeatable, check_statistics, made_in
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.loop_models import body_of
from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import make_outputs, rename_values, replace
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.replacement import attribute
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, GradientsByName, gradient_rule


@gradient_rule("Loop", "Scan")
def loops(b: Backward) -> Gradients | GradientsByName:
    """Yields places of first states and scan inputs, and names of captured values."""
    gradient = _Gradient(b)
    if gradient.sums or gradient.slopes or gradient.slices:
        yield from gradient.write()


class _Gradient:
    """Collects inputs and outputs of the Scan that computes the gradients of one loop."""

    def __init__(self, b: Backward) -> None:
        # The rules, of which this is one, are imported by `reverse`.
        from ortflow.workflow.graph.autodiff.reverse import vector_jacobian_product

        self.b, self.body = b, body_of(b.node, b.context, b.path)
        self.form, model = self.body.form, self.body.model
        check_statistics(b, model.graph, "its body")
        self.inputs = [value.name for value in self.body.graph.input]
        self.types = shapes.value_types(model)
        carried = self._carried()
        incoming = {}
        names = {}
        for place in self.body.results:
            output = place - self.form.outputs
            if output in carried or (output >= self.form.states and b.gradient(output)):
                # Two outputs may be one value, and an output may be an input.
                name = b.context.fresh(f"{b.node.name}/result")
                model.graph.node.append(helper.make_node("Identity", [model.graph.output[place].name], [name]))
                names[output], incoming[name] = name, b.context.fresh(f"{name}_gradient")
        described = [
            helper.make_value_info(name, model.graph.output[output + self.form.outputs].type)
            for output, name in names.items()
        ]
        make_outputs(model.graph, described)
        derived, reached = vector_jacobian_product(model, self.body.variables, {}, incoming)
        results = {value: f"{value}_grad" for value in reached}
        make_outputs(derived.graph, [value for value in derived.graph.output if value.name in set(results.values())])
        prune(derived.graph)
        # What later rewrites the main graph leaves bodies as they are.
        graph = compose(derived).graph
        check_repeatable(b, graph, "its body")
        replace(graph.initializer, [tensor for tensor in graph.initializer if tensor.name not in self.body.captured])
        self.graph = graph
        self.given = {output: incoming[name] for output, name in names.items()}
        """Place among the node's outputs -> the gradient's name in the graph."""
        self.results = results
        """Input of the body or captured value -> its gradient's name in the graph."""
        self.slopes = [output for output in self.given if output < self.form.states]
        """States whose gradient an iteration passes on to the one before."""
        self.sums = sorted(value for value in reached if value not in self.inputs)
        """Captured values."""
        self.slices = [place for place in self._slice_places() if self.inputs[place] in results and b.wants(place)]
        """Places of scan inputs whose gradient is needed."""

    def _slice_places(self) -> range:
        return range(self.form.first_slice, self.form.first_slice + self.form.slices)

    def _carried(self) -> set[int]:
        """States whose gradient an iteration needs: the loss depends on them, or a later iteration's gradient does."""
        b, form, graph = self.b, self.form, self.body.model.graph
        outputs = [value.name for value in graph.output]
        carried = {place for place in range(form.states) if b.gradient(place)}
        behind = {outputs[place] for place in self.body.results if b.gradient(place - form.outputs)}
        while True:
            roots = {*behind, *(outputs[form.outputs + place] for place in carried)}
            reached = gradient_path(graph, self.types, self.body.variables, roots).reached
            later = {place for place in range(form.states) if self.inputs[form.inputs + place] in reached} - carried
            if not later:
                return carried
            carried |= later

    def write(self) -> Gradients | GradientsByName:
        """The Scan; yields its gradients."""
        b, form = self.b, self.form
        used = walk.captured(self.graph) | {name for node in walk.nodes(self.graph.node) for name in node.input}
        renamed = {name: b.context.fresh(name) for name in made_in(self.graph)}
        scans: list[tuple[str, str, int, int]] = []  # value outside, name inside, axis, direction of the forward pass

        def inside(name: str) -> str:
            renamed[name] = b.context.fresh(name)
            return renamed[name]

        if form.inputs:
            count = self.inputs[0]
            scans.append((self._kept(count), inside(count), 0, 0))
            if self.inputs[1] in used:
                true = numpy_helper.from_array(np.array(True), self.inputs[1])
                self.graph.initializer.append(true)
                inside(self.inputs[1])
        states = (name for name in self.inputs[form.inputs : form.first_slice] if name in used)
        scans += [(self._kept(name), inside(name), 0, 0) for name in states]
        ahead, turned = (attribute(b.node, f"scan_input_{kind}", [0] * form.slices) for kind in ("axes", "directions"))
        for place in self._slice_places():
            at = place - form.first_slice
            if self.inputs[place] in used or at == 0:
                scans.append((b.input(place), inside(self.inputs[place]), ahead[at], turned[at]))
        outputs = len(b.node.output) - form.states
        axes, directions = (attribute(b.node, f"scan_output_{kind}", [0] * outputs) for kind in ("axes", "directions"))
        for output, name in self.given.items():
            if output >= form.states:
                at = output - form.states
                scans.append((b.gradient(output), inside(name), axes[at], directions[at]))
        return self._scan(renamed, scans, ahead, turned)

    def _scan(
        self,
        renamed: dict[str, str],
        scans: Sequence[tuple[str, str, int, int]],
        axes: Sequence[int],
        directions: Sequence[int],
    ) -> Gradients | GradientsByName:
        b, form, graph = self.b, self.form, self.graph
        states, first, results = [], [], []
        nodes_behind: list[onnx.NodeProto] = []
        kinds: dict[str, onnx.TypeProto] = {}
        for output in self.slopes:
            name = self.inputs[form.inputs + output]
            renamed[self.given[output]] = state = b.context.fresh(f"{name}_gradient")
            states.append(state)
            first.append(b.gradient(output) or b.zeros(b.input(form.inputs + output)))
            results.append(renamed[self.results[name]] if name in self.results else self._zeros(state, nodes_behind))
            kinds[state] = kinds[results[-1]] = self._kind(name)
        for value in self.sums:
            state, total = (b.context.fresh(f"{value}_gradient/{suffix}") for suffix in ("sum", "total"))
            nodes_behind.append(helper.make_node("Add", [state, renamed[self.results[value]]], [total], total))
            states.append(state)
            first.append(b.zeros(value))
            results.append(total)
            kinds[state] = kinds[total] = self._kind(value)
        for place in self.slices:
            results.append(renamed[self.results[self.inputs[place]]])
            kinds[results[-1]] = self._kind(self.inputs[place])
        for node in graph.node:
            rename_values(node, renamed)
        for tensor in graph.initializer:
            tensor.name = renamed.get(tensor.name, tensor.name)
        back = {new: old for old, new in renamed.items()}
        for _, name, _, _ in scans:
            kinds[name] = self._kind(back[name])
        for output, name in self.given.items():
            if output >= form.states:
                kinds[renamed[name]] = self._kind(self.body.graph.output[form.outputs + output].name)
        described = [
            [helper.make_value_info(name, kinds[name]) for name in names]
            for names in ([*states, *(name for _, name, _, _ in scans)], results)
        ]
        nodes = [*graph.node, *nodes_behind]
        step = helper.make_graph(nodes, b.context.fresh("gradient"), *described, list(graph.initializer))
        at = [place - form.first_slice for place in self.slices]
        layout = {
            "scan_output_axes": [axes[place] for place in at],
            "scan_output_directions": [1 - directions[place] for place in at],
        }
        # onnx refuses an empty list, whose type it cannot infer.
        layout = layout if at else {}
        name = b.context.fresh(f"{b.node.name}_Grad/Scan")
        outputs = [b.context.fresh(name) for _ in results]
        scan = helper.make_node(
            "Scan",
            [*first, *(value for value, _, _, _ in scans)],
            outputs,
            name,
            body=step,
            num_scan_inputs=len(scans),
            scan_input_axes=[axis for _, _, axis, _ in scans],
            scan_input_directions=[1 - direction for _, _, _, direction in scans],
            **layout,
        )
        gradients = self._unless_empty(scan, first, scans[0][0])
        targets: list[Any] = [form.inputs + output for output in self.slopes]
        return iter(zip([*targets, *self.sums, *self.slices], gradients, strict=True))

    def _unless_empty(self, scan: onnx.NodeProto, first: Sequence[str], stack: str) -> list[str]:
        """The results of the Scan; `first` if a Loop had no iterations."""
        b = self.b
        count = b.value(0) if self.form.inputs and not b.input(1) else None
        if not self.form.inputs or (count is not None and int(count.reshape(-1)[0]) > 0):
            b.nodes.append(scan)
            return list(scan.output)
        kinds = [self._kind(value) for value in (*self._state_names(), *self.sums)]
        branches = {}
        for branch, nodes in (("then_branch", [scan]), ("else_branch", [])):
            names = [b.context.fresh(f"{scan.name}/{branch}") for _ in first]
            sources = scan.output if nodes else first
            copies = [helper.make_node("Identity", [a], [c], c) for a, c in zip(sources, names, strict=True)]
            described = [helper.make_value_info(name, kind) for name, kind in zip(names, kinds, strict=True)]
            branches[branch] = helper.make_graph([*nodes, *copies], b.context.fresh(branch), [], described)
        # ONNX Runtime 1.19.2 cannot run a Scan over no elements.
        iterated = b("Greater", b("Size", stack), b.constant(0, "int64"))
        return b.several("If", len(first), iterated, **branches)

    def _state_names(self) -> list[str]:
        return [self.inputs[self.form.inputs + output] for output in self.slopes]

    def _zeros(self, state: str, nodes: list[onnx.NodeProto]) -> str:
        """Zeros for the gradient of a state that the body does not read."""
        b = self.b
        shape, zeros = (b.context.fresh(f"{state}/{operator}") for operator in ("Shape", "ConstantOfShape"))
        zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(b.element_type())))
        nodes.append(helper.make_node("Shape", [state], [shape], shape))
        nodes.append(helper.make_node("ConstantOfShape", [shape], [zeros], zeros, value=zero))
        return zeros

    def _kind(self, name: str) -> onnx.TypeProto:
        """Element type and rank of a value of the body."""
        kind = shapes.element_type(self.types, name) or TensorProto.FLOAT
        # ONNX Runtime needs ranks where it cannot infer them.
        rank = shapes.rank(self.types, name)
        return helper.make_tensor_type_proto(kind, None if rank is None else [None] * rank)

    def _kept(self, name: str) -> str:
        """An input of the body in all iterations: a further scan output of the forward node."""
        b, node, body = self.b, self.b.node, self.body.graph
        declared = next(value for value in body.input if value.name == name)
        if declared.type.WhichOneof("value") not in (None, "tensor_type"):
            raise b.refusal(f"the backward pass needs its state {walk.quoted(name)}, which is not a tensor")
        copy = b.context.fresh(f"{name}/kept")
        body.node.append(helper.make_node("Identity", [name], [copy], copy))
        body.output.append(helper.make_value_info(copy, self._kind(name)))
        # ONNX Runtime 1.19.2 fails on a Scan with an omitted output, and a Loop with one ends the process (SIGSEGV).
        for place, output in enumerate(node.output):
            node.output[place] = output or b.context.fresh(f"{node.name}/output")
        for option in node.attribute:
            if option.name in ("scan_output_axes", "scan_output_directions"):
                option.ints.append(0)
        node.output.append(b.context.fresh(f"{node.name}/{name}"))
        return str(node.output[-1])
