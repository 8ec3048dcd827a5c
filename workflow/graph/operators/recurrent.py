"""Rules for recurrent networks.

The forward node is kept. For each direction the gates of all steps are recomputed in one product, since the states
before each step are known. A Scan then propagates the gradient of the state backwards from step to step. Its factors
are computed beforehand, so that a step has few nodes, and the gradients of weights and data are products over all
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import LAST, Replacement
from ortflow.workflow.graph.rules.cost import Sizes, cost_rule
from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.traits import Trait, describe, weights

_DATA, _WEIGHT, _RECURRENCE, _BIAS, _LENGTHS, _HIDDEN, _CELL, _PEEPHOLES = range(8)
_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclass(frozen=True)
class Direction:
    """One direction of a node: its part of each input and output, without the direction axis."""

    b: Backward
    backwards: bool
    size: int
    """Number of elements of a state."""
    data: str
    """[steps, batch, inputs]"""
    weight: str
    """[gates, inputs]"""
    recurrence: str
    """[gates, size]"""
    bias: Sequence[str]
    """Biases of the input and of the recurrence, [gates] each; empty if the node has none."""
    before: str
    """States before each step, [steps, batch, size]."""
    states: str
    """States after each step, [steps, batch, size]."""
    cell: str
    """Initial cell, [batch, size]; empty if the network has none."""
    gradients: Sequence[str]
    """Gradients of the states, the last state and the last cell; empty for those that the loss does not read."""

    def affine(self, value: str, weight: str, bias: Sequence[str]) -> str:
        """Weight times each step's value, plus the bias."""
        product = self.b("MatMul", value, self.b("Transpose", weight, perm=[1, 0]))
        return self.b("Add", product, bias[0]) if bias else product

    def scan(
        self,
        step: Callable[[Replacement, Sequence[str], Sequence[str]], Sequence[str]],
        states: Sequence[str],
        inputs: Sequence[str],
        results: int,
        *,
        in_time: bool = False,
    ) -> list[str]:
        """Run `step` over all steps, backwards in time, or forwards if `in_time`.

        `step` takes a node writer and the names of states and inputs, and returns the new states and the results. The
        result is the last states, followed by the results of all steps.
        """
        b = self.b
        body = Replacement(onnx.NodeProto(name=f"{b.node.name}_Grad/step"), b.context)
        parameters = [
            [b.context.fresh(f"{b.node.name}_Grad/{kind}") for _ in names]
            for kind, names in (("state", states), ("input", inputs))
        ]
        result_names: list[str] = []
        for name in step(body, *parameters):
            inner = any(name in node.output for node in body.nodes) and name not in result_names
            result_names.append(name if inner else body("Identity", name))
        # ONNX Runtime needs the ranks, which it cannot infer behind an If whose branches give different ones.
        described = [
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, None]) for name in names]
            for names in ([*parameters[0], *parameters[1]], result_names)
        ]
        graph = helper.make_graph(body.nodes, "step", *described)
        turned = int(self.backwards == in_time)
        return b.several(
            "Scan",
            len(states) + results,
            *states,
            *inputs,
            body=graph,
            num_scan_inputs=len(inputs),
            scan_input_directions=[turned] * len(inputs),
            scan_output_directions=[turned] * results,
        )

    def first_gradients(self, cell: bool) -> list[str]:
        """Initial gradients: those of the last state and of the last cell."""
        nothing = ""
        gradients = []
        for name in self.gradients[1 : 3 if cell else 2]:
            if not name and not nothing:
                shape = self.b("Shape", self.before, start=1)
                nothing = self.b("ConstantOfShape", shape)
            gradients.append(name or nothing)
        return gradients


@dataclass(frozen=True)
class Found:
    """The gradients of one direction."""

    gates: str
    """Gradient of the input's contribution to the gates, [steps, batch, gates]."""
    recurrent: Sequence[tuple[str, str]]
    """Gradients of the recurrence's contribution, per group of gates, and the value that the recurrent weight
    multiplied.
    """
    hidden: str
    cell: str = ""


def _lstm(d: Direction) -> Found:
    b = d.b
    one = b.constant(1.0)
    preactivation = d.affine(d.data, d.weight, d.bias[:1])
    preactivation = b("Add", preactivation, d.affine(d.before, d.recurrence, d.bias[1:]))
    squashed, candidate = b.several("Split", 2, preactivation, b.ints(3 * d.size, d.size), axis=-1)
    # ONNX's order is i, o, f, c; PyTorch's is i, f, g, o.
    i, o, f = b.several("Split", 3, b("Sigmoid", squashed), axis=-1, num_outputs=3)
    g = b("Tanh", candidate)
    added = b("Mul", i, g)
    # ONNX's LSTM gives the cell of the last step only.
    _, before, cells = d.scan(
        lambda w, state, values: [new := w("Add", w("Mul", values[0], state[0]), values[1]), state[0], new],
        [d.cell], [f, added], 2, in_time=True,
    )  # fmt: skip
    t = b("Tanh", cells)
    through = b("Mul", o, b("Sub", one, b("Mul", t, t)))
    slopes = [
        b("Mul", added, b("Sub", one, i)),
        b("Mul", b("Mul", t, o), b("Sub", one, o)),
        b("Mul", b("Mul", before, f), b("Sub", one, f)),
        b("Mul", i, b("Sub", one, b("Mul", g, g))),
    ]

    def step(w: Replacement, state: Sequence[str], step_inputs: Sequence[str]) -> Sequence[str]:
        hidden = w("Add", state[0], step_inputs[3]) if len(step_inputs) > 3 else state[0]
        cell = w("Add", state[1], w("Mul", hidden, step_inputs[1]))
        gates = w("Mul", w("Concat", cell, hidden, cell, cell, axis=-1), step_inputs[0])
        return [w("MatMul", gates, d.recurrence), w("Mul", cell, step_inputs[2]), gates]

    inputs = [b("Concat", *slopes, axis=-1), through, f, *filter(None, d.gradients[:1])]
    hidden, cell, gates = d.scan(step, d.first_gradients(cell=True), inputs, 1)
    return Found(gates, [(gates, d.before)], hidden, cell)


def _gru(d: Direction) -> Found:
    b = d.b
    one = b.constant(1.0)
    size = d.size
    of_data = d.affine(d.data, d.weight, d.bias[:1])
    # ONNX's order is z, r, h; PyTorch's is r, z, n.
    squashed, candidate = b.several("Split", 2, of_data, b.ints(2 * size, size), axis=-1)
    outer, inner = b.several("Split", 2, d.recurrence, b.ints(2 * size, size), axis=0)
    biases = b.several("Split", 2, d.bias[1], b.ints(2 * size, size), axis=0) if d.bias else []
    squashed = b("Sigmoid", b("Add", squashed, d.affine(d.before, outer, biases[:1])))
    z, r = b.several("Split", 2, squashed, axis=-1, num_outputs=2)
    # PyTorch's GRU resets behind the product, as cuDNN's does (TorchScript's exporter writes 1); ONNX's default is 0.
    linear = bool(b.attribute("linear_before_reset", 0))
    recurrent_input = d.before if linear else b("Mul", r, d.before)
    recurrent = d.affine(recurrent_input, inner, biases[1:])
    n = b("Tanh", b("Add", candidate, b("Mul", r, recurrent) if linear else recurrent))
    of_n = b("Mul", b("Sub", one, z), b("Sub", one, b("Mul", n, n)))
    of_z = b("Mul", b("Sub", d.before, n), b("Mul", z, b("Sub", one, z)))
    of_r = b("Mul", recurrent if linear else d.before, b("Mul", r, b("Sub", one, r)))
    read = list(filter(None, d.gradients[:1]))
    if linear:
        slopes = b("Concat", of_z, b("Mul", of_n, of_r), b("Mul", of_n, r), axis=-1)

        def step(w: Replacement, state: Sequence[str], step_inputs: Sequence[str]) -> Sequence[str]:
            hidden = w("Add", state[0], step_inputs[2]) if read else state[0]
            gates = w("Mul", w("Concat", hidden, hidden, hidden, axis=-1), step_inputs[0])
            return [w("Add", w("MatMul", gates, d.recurrence), w("Mul", hidden, step_inputs[1])), hidden, gates]

        first, hidden, gates = d.scan(step, d.first_gradients(cell=False), [slopes, z, *read], 2)
        gates_rz, _ = b.several("Split", 2, gates, b.ints(2 * size, size), axis=-1)
        of_gates = b("Concat", gates_rz, b("Mul", hidden, of_n), axis=-1)
        return Found(of_gates, [(gates, d.before)], first)

    def nested(w: Replacement, state: Sequence[str], step_inputs: Sequence[str]) -> Sequence[str]:
        hidden = w("Add", state[0], step_inputs[5]) if read else state[0]
        new = w("Mul", hidden, step_inputs[0])
        reset = w("MatMul", new, inner)
        gates = w("Concat", w("Mul", hidden, step_inputs[1]), w("Mul", reset, step_inputs[2]), axis=-1)
        passed = w("Add", w("Mul", hidden, step_inputs[3]), w("Mul", reset, step_inputs[4]))
        return [w("Add", passed, w("MatMul", gates, outer)), gates, new]

    first, gates, new = d.scan(nested, d.first_gradients(cell=False), [of_n, of_z, of_r, z, r, *read], 2)
    return Found(b("Concat", gates, new, axis=-1), [(gates, d.before), (new, recurrent_input)], first)


def _rnn(d: Direction) -> Found:
    b = d.b
    slope = b("Sub", b.constant(1.0), b("Mul", d.states, d.states))
    read = list(filter(None, d.gradients[:1]))

    def step(w: Replacement, state: Sequence[str], step_inputs: Sequence[str]) -> Sequence[str]:
        hidden = w("Add", state[0], step_inputs[1]) if read else state[0]
        gate = w("Mul", hidden, step_inputs[0])
        return [w("MatMul", gate, d.recurrence), gate]

    first, gates = d.scan(step, d.first_gradients(cell=False), [slope, *read], 1)
    return Found(gates, [(gates, d.before)], first)


_KINDS = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}


@gradient_rule("LSTM", "GRU", "RNN")
def recurrent(b: Backward) -> Gradients:
    _check(b)
    directions = _directions(b)
    gradients_of = [_KINDS[b.node.op_type](direction) for direction in directions]

    def stacked(values: Sequence[str]) -> str:
        unsqueezed = [b("Unsqueeze", value, b.ints(0)) for value in values]
        return b("Concat", *unsqueezed, axis=0) if len(unsqueezed) > 1 else unsqueezed[0]

    if b.wants(_DATA):
        total = ""
        for direction, gradient in zip(directions, gradients_of, strict=True):
            part = b("MatMul", gradient.gates, direction.weight)
            total = b("Add", total, part) if total else part
        yield _DATA, total
    if b.wants(_WEIGHT):
        yield _WEIGHT, stacked([_product(b, g.gates, d.data) for d, g in zip(directions, gradients_of, strict=True)])
    if b.wants(_RECURRENCE):
        yield _RECURRENCE, stacked([_joined(b, [_product(b, *pair) for pair in g.recurrent]) for g in gradients_of])
    if b.wants(_BIAS):
        sums = [[_sum(b, g.gates), *(_sum(b, gates) for gates, _ in g.recurrent)] for g in gradients_of]
        if b.node.op_type != "GRU" or not b.attribute("linear_before_reset", 0):
            # Both biases are added to the same gates.
            sums = [[sums_of_bias[0], sums_of_bias[0]] for sums_of_bias in sums]
        yield _BIAS, stacked([_joined(b, sums_of_bias) for sums_of_bias in sums])
    if b.wants(_HIDDEN):
        yield _HIDDEN, stacked([g.hidden for g in gradients_of])
    if b.wants(_CELL):
        yield _CELL, stacked([g.cell for g in gradients_of])


def _joined(b: Backward, values: Sequence[str]) -> str:
    return b("Concat", *values, axis=0) if len(values) > 1 else values[0]


def _product(b: Backward, gates: str, values: str) -> str:
    """Sum over steps and batch of the gates' gradients times the values."""
    rows = b("Reshape", gates, b("Concat", b.ints(-1), b("Shape", gates, start=2), axis=0))
    columns = b("Reshape", values, b("Concat", b.ints(-1), b("Shape", values, start=2), axis=0))
    return b("Gemm", rows, columns, transA=1)


def _sum(b: Backward, gates: str) -> str:
    return b("ReduceSum", gates, b.ints(0, 1), keepdims=0)


def _check(b: Backward) -> None:
    kind = b.node.op_type
    activations = [name.decode() if isinstance(name, bytes) else name for name in b.attribute("activations", [])]
    usual = _ACTIVATIONS[kind]
    reasons = {
        "it has sequence lengths": bool(b.input(_LENGTHS)),
        "it has peepholes": kind == "LSTM" and bool(b.input(_PEEPHOLES)),
        "its layout is 1, which ONNX Runtime cannot run": bool(b.attribute("layout", 0)),
        "it clips its gates": bool(b.attribute("clip", 0)),
        "its input and forget gates are coupled": bool(b.attribute("input_forget", 0)),
        f"its activations are not {' and '.join(sorted(set(usual)))}": any(
            name.lower() != usual[place % len(usual)] for place, name in enumerate(activations)
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise b.refusal(reason)


def _directions(b: Backward) -> list[Direction]:
    mode = b.attribute("direction", "forward")
    count = 2 if mode == "bidirectional" else 1
    size = b.attribute("hidden_size", None) or (shapes.shape(b.context.types, b.input(_RECURRENCE)) or [None])[-1]
    if size is None:
        raise b.refusal("its hidden_size is not known")
    gates = _GATES[b.node.op_type] * size

    def apart(value: str, axis: int) -> list[str]:
        """Remove the direction axis."""
        if not value:
            return [""] * count
        parts = b.several("Split", count, value, axis=axis, num_outputs=count) if count > 1 else [value]
        return [b("Squeeze", part, b.ints(axis)) for part in parts]

    states = apart(b.saved_output(0), 1)
    parts = {place: apart(b.input(place), 0) for place in (_WEIGHT, _RECURRENCE, _BIAS, _HIDDEN)}
    cells = apart(b.input(_CELL), 0) if b.node.op_type == "LSTM" else [""] * count
    gradients = [apart(b.gradient(place), 1 if place == 0 else 0) for place in range(3)]
    directions = []
    for place in range(count):
        backwards = mode == "reverse" or place == 1
        nothing = (
            b("ConstantOfShape", b("Shape", states[place], start=1))
            if not (parts[_HIDDEN][place] and cells[place])
            else ""
        )
        first = b("Unsqueeze", parts[_HIDDEN][place] or nothing, b.ints(0))
        shifted = b("Slice", states[place], b.ints(int(backwards)), b.ints(LAST if backwards else -1), b.ints(0))
        bias = parts[_BIAS][place]
        directions.append(
            Direction(
                b,
                backwards,
                size,
                b.input(_DATA),
                parts[_WEIGHT][place],
                parts[_RECURRENCE][place],
                b.several("Split", 2, bias, b.ints(gates, gates), axis=0) if bias else [],
                b("Concat", shifted, first, axis=0) if backwards else b("Concat", first, shifted, axis=0),
                states[place],
                cells[place] or nothing,
                [parts[place] for parts in gradients],
            )
        )
    return directions


@cost_rule("LSTM", "GRU", "RNN")
def products_of_steps(node: onnx.NodeProto, sizes: Sizes) -> int:
    rows = math.prod(sizes.dims(node.input[0])[:2])
    return 2 * rows * (sizes.elements(node.input[1]) + sizes.elements(node.input[2]))


weights(["LSTM"], 1, 2, 3, 7)
weights(["GRU", "RNN"], 1, 2, 3)
describe(["LSTM", "GRU", "RNN"], Trait.HEAVY)
