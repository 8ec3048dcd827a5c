"""Builds the graphs of a pipeline's stages from the forward graph of the whole model.

Called by step `configure` on one rank, once for each part of a horizontally divided model. Writes nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.assembly.stage_description import check_statistics, described, notes_on, with_costs
from ortflow.workflow.assembly.stage_forms import StageForm, forms_of, half_form
from ortflow.workflow.device import HALF_PRECISIONS
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.ir import collective, shapes
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.collectives_on_gpu import on_gpu
from ortflow.workflow.graph.optimize.fixed_shapes import fix_shapes
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.stages.balance import (
    OTHER,
    PER_BYTE,
    PER_BYTE_ON_GPUS,
    SECONDS_PER_BYTE,
    balanced_cuts,
    shapes_of,
    sizes_of,
)
from ortflow.workflow.graph.stages.costs import Costs, costs_for
from ortflow.workflow.graph.stages.cut import WHERE
from ortflow.workflow.graph.stages.derivative import Derivative, carries_gradient, differentiate_pieces
from ortflow.workflow.graph.stages.halves import halves
from ortflow.workflow.graph.stages.node_costs import NodeCosts
from ortflow.workflow.graph.stages.pieces import Piece, cut_graph
from ortflow.workflow.graph.types import LOSS_SUM
from ortflow.workflow.parallel.stage import HALF, StageSet
from ortflow.workflow.run.rundir import write_atomically


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of all stages, in memory."""

    stages: StageSet
    files: dict[Path, bytes]
    """Path -> content, of each graph in each of its forms; the set's description comes last."""
    cuts: list[list[str]]
    """The tensors at which the model was cut."""
    trained: tuple[str, ...]
    """Parameters for which some stage computes a gradient, in the model's order."""
    notes: tuple[str, ...]
    """Lines for the log."""

    def write(self) -> None:
        """Write the files, the description last."""
        for path, content in self.files.items():
            write_atomically(path, content)


@dataclass(frozen=True)
class Division:
    """How to divide a model."""

    ranks: int
    """Ranks of the pipeline."""
    chunks: int = 1
    """Stages per rank."""
    cuts: Sequence[Sequence[str]] | None = None
    """Tensors of each cut; found automatically if None."""
    rows: int = 1
    """Samples per micro-batch, for balancing."""
    length: int = 0
    """Size of the dynamic axes, for balancing and for the kernels of long attention; 0 if unknown."""
    recompute: Sequence[str] = ()
    """Patterns of `model.recompute`; layers that it finds or names are marked in the graph."""
    precision: str | None = None
    """`train.precision` of a run on GPUs; None on CPUs."""
    measured: NodeCosts | None = None
    """Measured costs of the nodes, for balancing; by default their operations are counted."""


def build_stages(
    prepared: onnx.ModelProto,
    evaluate: onnx.ModelProto,
    weights: Collection[str],
    trained: Sequence[str],
    division: Division,
    root: Path,
) -> StageGraphs:
    """Cut a model into stages and differentiate each.

    Parameters
    ----------
    prepared
        The forward graph in training mode with its loss: outputs are the loss and running statistics `<name>_new`.
    evaluate
        The evaluation graph, which is cut at the same tensors. Outputs whose names do not begin with `ortflow.` are
        left out.
    weights
        Inputs that are parameters or running statistics.
    trained
        Parameters that are trained.
    division
        How to divide it.
    root
        Folder in which the files will lie.

    Raises
    ------
    UserError
        If the model cannot be divided like this, or a node has no gradient.
    """
    count = division.ranks * division.chunks
    cuts = [list(cut) for cut in division.cuts] if division.cuts is not None else None
    if cuts is not None and len(cuts) != count - 1:
        raise UserError(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, and {division.ranks} ranks"
            f"{f' of {division.chunks} chunks' if division.chunks > 1 else ''} need {count}",
            where=WHERE,
            fix=f"list {count - 1} cuts, or leave the key out",
        )
    evaluated = _for_metrics(evaluate)
    costs, seconds = _costs(prepared, weights, division)
    if cuts is None:
        common = _made(prepared.graph) & _made(evaluated.graph)
        counted = PER_BYTE if division.precision is None else PER_BYTE_ON_GPUS
        per_byte = SECONDS_PER_BYTE if seconds is not None else counted
        cuts = balanced_cuts(prepared, count, weights, costs, allowed=common, seconds=seconds, per_byte=per_byte)
    differentiable, notes = make_differentiable(keeping(prepared, cuts), trained, LOSS_SUM)
    pieces, derivatives = _differentiated(differentiable, prepared, cuts, weights, trained, LOSS_SUM)
    eval_pieces = cut_graph(evaluated, [_in_evaluation(prepared.graph, evaluated.graph, cut) for cut in cuts], weights)

    types = shapes.value_types(differentiable), shapes.value_types(evaluated)
    stages = described(pieces, eval_pieces, derivatives, types, weights)
    stage_set = StageSet(root, with_costs(stages, prepared.graph, cuts, weights, costs, seconds), division.ranks)
    check_statistics(prepared.graph, stage_set)
    files: dict[Path, bytes] = {}
    on_gpus = division.precision is not None
    for number in range(count):
        derivative = derivatives[number]
        recompute(derivative.model.graph, division.recompute, derivative.roots, partial=True)
        forms = forms_of(derivative.model, division.length, on_gpus=on_gpus)
        files |= _training_files(stage_set, pieces[number], number, forms, weights, on_gpus=on_gpus)
        _finish(eval_pieces[number].model, on_gpus=on_gpus)
        files[stage_set.eval(number)] = _bytes(eval_pieces[number].model)
    files[stage_set.description] = stage_set.to_bytes()
    reached = {name for derivative in derivatives for name in derivative.trained}
    if division.precision in HALF_PRECISIONS:
        half_files, lines = _half_files(prepared, cuts, weights, trained, division, stage_set, eval_pieces)
        files |= half_files
        notes += lines
    notes += notes_on(cuts, stage_set)
    return StageGraphs(stage_set, files, cuts, tuple(name for name in trained if name in reached), tuple(notes))


def _costs(
    prepared: onnx.ModelProto, weights: Collection[str], division: Division
) -> tuple[Costs, Callable[[onnx.NodeProto], float] | None]:
    """Counted costs for a micro-batch, and the seconds of a node if they were measured."""
    sizes = prepared.graph, weights, division.rows, division.length or OTHER
    if division.precision is not None:
        # The estimates for GPUs were made with the shapes that graphs declare.
        return Costs(prepared, sizes_of(*sizes), 1), None
    measured = division.measured
    if measured is None or not measured.known:
        return costs_for(prepared, shapes_of(*sizes)), None
    costs = costs_for(prepared, measured.batch)
    return costs, measured.seconds(costs)


def _differentiated(
    graph: onnx.ModelProto,
    prepared: onnx.ModelProto,
    cuts: Sequence[Sequence[str]],
    weights: Collection[str],
    trained: Sequence[str],
    loss: str,
) -> tuple[list[Piece], list[Derivative]]:
    """The stages of a differentiable graph, with the outputs of `prepared` and the loss, and their derivatives."""
    rewrites.before(graph.graph)
    outputs = {loss, *(value.name for value in prepared.graph.output)}
    replace(graph.graph.output, [value for value in graph.graph.output if value.name in outputs])
    pieces = cut_graph(graph, cuts, weights)
    return pieces, differentiate_pieces(pieces, trained, carries_gradient(graph, trained, loss), loss)


def _half_files(
    prepared: onnx.ModelProto,
    cuts: Sequence[Sequence[str]],
    weights: Collection[str],
    trained: Sequence[str],
    division: Division,
    exact: StageSet,
    eval_pieces: Sequence[Piece],
) -> tuple[dict[Path, bytes], list[str]]:
    """The stages of training in half precision, cut at the same tensors, and log lines."""
    from ortflow.workflow.fusion.halved import SCALED, scaled

    precision = division.precision
    assert precision is not None
    forward, notes = scaled(keeping(prepared, cuts), trained, precision)
    differentiable, _ = make_differentiable(forward, trained, SCALED)
    pieces, derivatives = _differentiated(differentiable, prepared, cuts, weights, trained, SCALED)
    types = shapes.value_types(differentiable)
    descriptions = described(pieces, eval_pieces, derivatives, (types, types), weights)
    stage_set = StageSet(exact.root, descriptions, exact.ranks, HALF)
    files: dict[Path, bytes] = {}
    for number, (piece, derivative) in enumerate(zip(pieces, derivatives, strict=True)):
        stage, exact_stage = stage_set.stages[number], exact.stages[number]
        if set(stage.trained) != set(exact_stage.trained) or not set(stage.tensors) <= set(exact_stage.tensors):
            raise UserError(
                f"stage {number} needs other weights in {precision} than in fp32",
                where=WHERE,
                fix="cut the model elsewhere, or set train.precision to fp32",
            )
        replace(derivative.model.graph.output, [v for v in derivative.model.graph.output if v.name != SCALED])
        recompute(derivative.model.graph, division.recompute, derivative.roots, partial=True)
        form = half_form(derivative.model, list(derivative.trained), precision)
        files |= _training_files(stage_set, piece, number, [form], weights, without=SCALED)
    files[stage_set.description] = stage_set.to_bytes()
    return files, notes


def _training_files(
    stage_set: StageSet,
    piece: Piece,
    number: int,
    forms: Iterable[StageForm],
    weights: Collection[str],
    *,
    on_gpus: bool = True,
    without: str | None = None,
) -> dict[Path, bytes]:
    """The graphs of a stage in each form. `without` is an output of the piece that ranks do not need."""
    files: dict[Path, bytes] = {}
    last = number == len(stage_set.stages) - 1
    ends = [str(value.name) for value in piece.model.graph.output if value.name != without]
    moving = [name for name in piece.weights if f"{name}_new" in ends]
    for form in forms:
        forward, backward = halves(form.both, ends, [name for name in weights if name not in moving], moving)
        finished = [form.finish(graph) for graph in (forward, backward, form.both)]
        for graph in finished:
            _finish(graph, on_gpus=on_gpus)
            if on_gpus:
                fix_shapes(graph.graph)
        files[form.form.of(stage_set.forward(number))] = _bytes(finished[0])
        if backward.graph.output:
            files[form.form.of(stage_set.backward(number))] = _bytes(finished[1])
        if last:
            files[form.form.of(stage_set.both(number))] = _bytes(finished[2])
    return files


def _finish(graph: onnx.ModelProto, *, on_gpus: bool) -> None:
    if collective.has_collectives(graph):
        collective.finish(graph)
        if on_gpus:
            on_gpu(graph)


def _bytes(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def _made(graph: onnx.GraphProto) -> set[str]:
    return {name for node in graph.node for name in node.output if name}


def _for_metrics(evaluate: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the loss and the metrics as its only outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(evaluate)
    replace(copy.graph.output, [value for value in copy.graph.output if value.name.startswith("ortflow.")])
    prune(copy.graph)
    return copy


def keeping(prepared: onnx.ModelProto, cuts: Sequence[Sequence[str]]) -> onnx.ModelProto:
    """A copy with the tensors of the cuts as additional outputs, so that optimizations keep them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(prepared)
    types, results = shapes.value_types(copy), _made(copy.graph)
    values = [name for cut in cuts for name in cut if name in results and name in types]
    copy.graph.output.extend(onnx.helper.make_value_info(name, types[name]) for name in dict.fromkeys(values))
    return copy


def _in_evaluation(prepared: onnx.GraphProto, evaluate: onnx.GraphProto, cut: Sequence[str]) -> list[str]:
    """The same tensors in the evaluation graph, where Dropout passes on its input."""
    results = _made(evaluate)
    dropped = {node.output[0]: node.input[0] for node in prepared.node if node.op_type == "Dropout" and not node.domain}
    names = []
    for name in cut:
        while name not in results and name in dropped:
            name = dropped[name]
        names.append(name)
    return names
