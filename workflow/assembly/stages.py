"""Builds the graphs of a pipeline's stages from the forward graph of the whole model.

Called by step `configure` on one rank, once for each part of a horizontally divided model. Writes nothing itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.division.again import gather_again
from ortflow.workflow.graph.ir import collective, shapes
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.order import results_first
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.stages.balance import balanced_cuts, sizes_of
from ortflow.workflow.graph.stages.cut import STATISTIC, WHERE
from ortflow.workflow.graph.stages.derivative import Derivative, carries_gradient, differentiate_pieces
from ortflow.workflow.graph.stages.halves import halves
from ortflow.workflow.graph.stages.pieces import Piece, cut_graph
from ortflow.workflow.graph.types import LOSS_SUM, with_kernels_of
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.parallel.stage import Stage, StageSet, Value
from ortflow.workflow.rundir import write_atomically


@dataclass(frozen=True)
class StageGraphs:
    """The graphs of all stages, in memory."""

    stages: StageSet
    files: dict[Path, bytes]
    """Path -> content. Graphs of `with_kernels_of` contain ortflow's operators; the set's description comes last."""
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
    """Patterns of `model.recompute`."""


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
    if cuts is None:
        common = _made(prepared.graph) & _made(evaluated.graph)
        sizes = sizes_of(prepared.graph, weights, division.rows, division.length or 128)
        cuts = balanced_cuts(prepared, count, weights, sizes, allowed=common)
    whole, notes = make_differentiable(keeping(prepared, cuts), trained, LOSS_SUM)
    rewrites.before(whole.graph)
    _without(whole, prepared)
    pieces = cut_graph(whole, cuts, weights)
    derivatives = differentiate_pieces(pieces, trained, carries_gradient(whole, trained))
    eval_pieces = cut_graph(evaluated, [_in_evaluation(prepared.graph, evaluated.graph, cut) for cut in cuts], weights)

    types, eval_types = shapes.value_types(whole), shapes.value_types(evaluated)
    stages: list[Stage] = []
    behind: tuple[str, ...] = ()
    for number in reversed(range(count)):
        piece, other, derivative = pieces[number], eval_pieces[number], derivatives[number]
        stages.insert(
            0,
            Stage(
                number=number,
                receives=_values(piece.receives, types, derivative.received),
                sends=_values(piece.sends, types, behind),
                passed=piece.passed,
                eval_receives=_values(other.receives, eval_types, ()),
                eval_sends=_values(other.sends, eval_types, ()),
                eval_passed=other.passed,
                batch=tuple(dict.fromkeys((*piece.batch, *other.batch))),
                tensors=tuple(name for name in weights if name in piece.weights or name in other.weights),
                trained=derivative.trained,
                dropouts=piece.dropouts,
            ),
        )
        behind = derivative.received
    made = StageSet(root, tuple(stages), division.ranks)
    _check_statistics(prepared.graph, made)
    files: dict[Path, bytes] = {}
    for number in range(count):
        files |= _training_files(made, number, pieces[number], derivatives[number], division, weights)
        if collective.has_collectives(eval_pieces[number].model):
            collective.finish(eval_pieces[number].model)
        files[made.eval(number)] = _bytes(eval_pieces[number].model)
    files[made.description] = made.to_bytes()
    reached = {name for derivative in derivatives for name in derivative.trained}
    notes += _notes(cuts, made)
    return StageGraphs(made, files, cuts, tuple(name for name in trained if name in reached), tuple(notes))


def _check_statistics(prepared: onnx.GraphProto, made: StageSet) -> None:
    """Only one rank of a pipeline moves a running statistic: no other may evaluate with it."""
    moving = {value.name.removesuffix(STATISTIC) for value in prepared.output if value.name.endswith(STATISTIC)}
    for name, ranks in made.holders().items():
        if name in moving and len(ranks) > 1:
            raise UserError(
                f"the ranks {ranks[0]} and {ranks[1]} of a pipeline both use the running statistic {name!r}, one in "
                "training and the other in evaluation",
                where=WHERE,
                fix="cut the model where its layers are not in two stages",
            )


def _training_files(
    made: StageSet, number: int, piece: Piece, derivative: Derivative, division: Division, weights: Collection[str]
) -> dict[Path, bytes]:
    model = derivative.model
    recompute(model.graph, division.recompute, derivative.roots, partial=True)
    plain, faster = model, with_kernels(model, division.length)
    files: dict[Path, bytes] = {}
    last = number == len(made.stages) - 1
    ends = [str(value.name) for value in piece.model.graph.output]
    moving = [name for name in piece.weights if f"{name}_new" in ends]
    for form, of in ((plain, _same), (faster, with_kernels_of)):
        rewrites.after(form.graph)
        both = compose(form)
        results_first(both.graph)
        gather_again(both.graph)
        forward, backward = halves(both, ends, [name for name in weights if name not in moving], moving)
        for graph in (forward, backward, both):
            if collective.has_collectives(graph):
                collective.finish(graph)
        files[of(made.forward(number))] = _bytes(forward)
        if backward.graph.output:
            files[of(made.backward(number))] = _bytes(backward)
        if last:
            files[of(made.both(number))] = _bytes(both)
    return files


def _same(path: Path) -> Path:
    return path


def _bytes(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def _values(names: Sequence[str], types: dict[str, onnx.TypeProto], gradients: Collection[str]) -> tuple[Value, ...]:
    def dtype(name: str) -> str:
        return str(onnx.helper.tensor_dtype_to_np_dtype(shapes.element_type(types, name)).name)

    return tuple(Value(name, dtype(name), name in gradients) for name in names)


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
    types, made = shapes.value_types(copy), _made(copy.graph)
    kept = [name for cut in cuts for name in cut if name in made and name in types]
    copy.graph.output.extend(onnx.helper.make_value_info(name, types[name]) for name in dict.fromkeys(kept))
    return copy


def _without(whole: onnx.ModelProto, prepared: onnx.ModelProto) -> None:
    """Remove the outputs that `keeping` added, in place."""
    first = {value.name for value in prepared.graph.output}
    replace(whole.graph.output, [value for value in whole.graph.output if value.name in first])


def _in_evaluation(prepared: onnx.GraphProto, evaluate: onnx.GraphProto, cut: Sequence[str]) -> list[str]:
    """The same tensors in the evaluation graph, where Dropout passes on its input."""
    made = _made(evaluate)
    dropped = {node.output[0]: node.input[0] for node in prepared.node if node.op_type == "Dropout" and not node.domain}
    names = []
    for name in cut:
        while name not in made and name in dropped:
            name = dropped[name]
        names.append(name)
    return names


def _notes(cuts: Sequence[Sequence[str]], made: StageSet) -> list[str]:
    lines = [f"stage {number} ends with {', '.join(cut)}" for number, cut in enumerate(cuts)]
    for name, ranks in made.holders().items():
        if len(ranks) > 1:
            lines.append(f"{name} is held by the ranks {', '.join(map(str, ranks))} of each pipeline")
    return lines
