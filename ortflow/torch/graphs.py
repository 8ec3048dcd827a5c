"""The forward and the backward graph of a traced call. Called by `engine`; pure.

Both passes are differentiated as one graph and then divided: what the backward graph needs of the forward pass are
further outputs of the forward graph, the kept values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
from onnx import helper

from ortflow.exporter.state import UPDATED
from ortflow.torch import gpu_graphs
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.path import gradient_path
from ortflow.workflow.graph.autodiff.reverse import vector_jacobian_product
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.edit import Editor, make_outputs
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.normalize.randomness import seed_random_operators
from ortflow.workflow.graph.objective.modes import train_mode
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.layer_marks import mark_layers
from ortflow.workflow.graph.optimize.mean_losses import divide_means
from ortflow.workflow.graph.optimize.order import results_first
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.stages.halves import halves
from ortflow.workflow.graph.types import SEED
from ortflow.workflow.kernels.graph import with_kernels

_OF_SIZES = frozenset({
    "Add", "Cast", "Concat", "Div", "Equal", "Gather", "Identity", "Max", "Min", "Mod", "Mul", "Neg", "ReduceProd",
    "Reshape", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where",
})  # fmt: skip
"""Operators with which graphs compute shapes."""
NEW = "_new"
"""Ending of the output with the new value of a buffer."""


@dataclass(frozen=True)
class Forward:
    """The forward graph in normal form."""

    model: onnx.ModelProto
    outputs: tuple[str, ...]
    """Of forward itself."""
    moved: Mapping[str, str]
    """Buffer that the call changes -> the output with its new value."""
    counts: Mapping[str, int]
    """Running mean -> how often the call moves it."""

    @property
    def is_random(self) -> bool:
        """Whether the graph draws random numbers."""
        return any(node.op_type == "Dropout" and node.domain == "" for node in self.model.graph.node) or any(
            value.name == SEED for value in self.model.graph.input
        )


@dataclass(frozen=True)
class Pair:
    """The graphs of a call, for gradients of some of its outputs."""

    forward: onnx.ModelProto
    backward: onnx.ModelProto | None
    """None where nothing is differentiated."""
    kept: tuple[str, ...]
    """Values of the forward graph that the backward graph reads, as it names them."""
    given: Mapping[str, str]
    """Output -> the backward graph's input with the gradient of the loss with respect to it."""
    wanted: tuple[str, ...]
    """Inputs of the forward graph whose gradients `<name>_grad` the backward graph computes."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Output -> the output that is the same in half precision, and that the forward graph gives in its place."""
    halves: Mapping[str, str] = field(default_factory=dict)
    """Input of the graphs that is a parameter in half precision -> the parameter."""


def forward_of(model: onnx.ModelProto, frozen: Collection[str]) -> Forward:
    """The forward graph of a traced call, in the modes it was traced in. Raises UserError.

    `frozen`: running statistics of normalisations in evaluation mode.
    """
    prepared, _ = prepare(model)
    avoid_wrong_forms(prepared)
    graph = prepared.graph
    dims = {value.name: value.type for value in graph.input}
    counts: dict[str, int] = {}
    for node in graph.node:
        # Without running statistics, or with a cumulative average of them, the graph computes those of the batch.
        updates_buffer = node.op_type == "BatchNormalization" and node.domain == "" and node.input[3] in dims
        if updates_buffer and node.input[3] not in frozen:
            counts[node.input[3]] = counts.get(node.input[3], 0) + 1
    outputs = [_copy(value) for value in graph.output if not value.name.startswith(UPDATED)]
    moved = {v.name.removeprefix(UPDATED): v.name for v in graph.output if v.name.startswith(UPDATED)}
    _, updates = train_mode(graph, frozen)
    updates = {name: value for name, value in updates.items() if name in dims}
    # A graph that only writes a buffer, as spectral_norm does, has no such input.
    dims = {v.name.removeprefix(UPDATED): v.type for v in graph.output if v.name.startswith(UPDATED)} | dims
    edit = Editor(graph)
    new = []
    for name, value in {**moved, **updates}.items():
        edit("Identity", value, output=name + NEW)
        new.append(helper.make_value_info(name + NEW, dims[name]))
    moved = {name: name + NEW for name in (*moved, *updates)}
    make_outputs(graph, [*outputs, *new])
    prune(graph)
    seed_random_operators(prepared)
    divide_means(graph)
    return Forward(prepared, tuple(value.name for value in outputs), moved, counts)


def differentiable(forward: Forward, variables: Sequence[str]) -> list[str]:
    """The outputs that have a gradient with respect to some of these inputs."""
    graph = forward.model.graph
    types = shapes.value_types(forward.model)
    path = gradient_path(graph, types, variables, forward.outputs)
    return [name for name in forward.outputs if name in path.values]


@dataclass(frozen=True)
class Target:
    """What graphs are made for."""

    kind: str = "cpu"
    """cpu or cuda."""
    precision: str = "fp32"
    """fp32, tf32, bf16 or fp16."""
    memory_level: int = 0
    """From 1 on, layers are recomputed."""
    halves: tuple[str, ...] = ()
    """Outputs that the user takes in half precision."""


def pair_of(
    forward: Forward, variables: Sequence[str], roots: Sequence[str], tensors: Collection[str], target: Target
) -> Pair:
    """The graphs that compute gradients of `roots`, which are outputs, with respect to `variables`.

    `tensors`: inputs that are parameters and buffers. Raises UserError if a node has no gradient.
    """
    incoming = {name: f"{name}/gradient" for name in roots}
    model = _marked(forward.model, variables, roots[-1]) if roots and target.memory_level else forward.model
    if target.kind == "cuda":
        model = gpu_graphs.prepared(model, variables, target.precision)
    if roots:
        model, _ = make_differentiable(model, variables, *roots)
    else:
        model = onnx.ModelProto.FromString(model.SerializeToString())
    rewrites.before(model.graph)
    reached: list[str] = []
    if roots:
        model, reached = vector_jacobian_product(model, variables, {}, incoming)
        if target.memory_level:
            recompute(model.graph, [], [*incoming.values()], partial=True)
    joint = gpu_graphs.placed(model, reached, target.precision) if target.kind == "cuda" else _for_cpu(model)
    unchanged = [name for name in tensors if name not in forward.moved]
    half_weights: dict[str, str] = {}
    if target.kind == "cuda":
        joint, half_weights = gpu_graphs.reading_halves(joint, unchanged, target.precision)
        unchanged += half_weights
    pair = divided(joint, forward, incoming, reached, unchanged) if roots else Pair(joint, None, (), {}, ())
    if target.kind == "cpu":
        return pair
    backward = None if pair.backward is None else gpu_graphs.finished(pair.backward)
    front = gpu_graphs.finished(pair.forward)
    aliases = gpu_graphs.in_half(front.graph, target.halves)
    return replace(pair, forward=front, backward=backward, aliases=aliases, halves=half_weights)


def divided(
    joint: onnx.ModelProto,
    forward: Forward,
    incoming: Mapping[str, str],
    reached: Sequence[str],
    unchanged: Collection[str],
) -> Pair:
    """Divide the graph of both passes; `unchanged` are inputs that a call does not change."""
    ends = [*forward.outputs, *forward.moved.values()]
    front, back = halves(joint, ends, unchanged, list(forward.moved))
    forward_outputs = {value.name for value in front.graph.output}
    saved_outputs = tuple(value.name for value in back.graph.input if value.name in forward_outputs)
    return Pair(front, back, saved_outputs, incoming, tuple(reached))


def _marked(model: onnx.ModelProto, variables: Sequence[str], root: str) -> onnx.ModelProto:
    """A copy whose repeating layers are marked; without marks if nothing repeats."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    with contextlib.suppress(UserError):
        mark_layers(copy, "layers", variables, root)
    return copy


def _for_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    faster = with_kernels(model)
    rewrites.after(faster.graph)
    composed = compose(faster)
    sort_nodes(composed.graph)
    results_first(composed.graph)
    return composed


def on_host(model: onnx.ModelProto) -> frozenset[str]:
    """Outputs computed from sizes alone: ONNX Runtime computes them in the host's memory."""
    size_values = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:
        if not node.domain and (
            node.op_type in ("Shape", "Size") or (node.op_type in _OF_SIZES and walk.inputs(node) <= size_values)
        ):
            size_values.update(node.output)
    return frozenset(value.name for value in model.graph.output if value.name in size_values)


def _copy(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    return onnx.ValueInfoProto.FromString(value.SerializeToString())
