"""Builds the graphs and the tensor index of each part of each stage of a divided model.

Called by `build` after the graphs of the whole model, whose index remains the form of checkpoints and exports.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from ortflow.workflow.assembly.stages import Division as Stages
from ortflow.workflow.assembly.stages import StageGraphs, build_stages
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division.divide import divide as divide_layers
from ortflow.workflow.graph.division.regather import gather_again
from ortflow.workflow.graph.division.sequence_graph import share_tokens
from ortflow.workflow.graph.ir.collective import Kind, finish, has_collectives, is_collective, kind_of
from ortflow.workflow.graph.optimize.collectives_on_gpu import on_gpu
from ortflow.workflow.graph.stages.node_costs import NodeCosts
from ortflow.workflow.graph.types import LOSS_SUM
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.parallel.division import CHANNEL, NAME, Division, Holding, folder_of
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.parallel.region import WHOLE, Region
from ortflow.workflow.parallel.ties import ties
from ortflow.workflow.spec.run import TrainerRunSpec

TrainGraph = Callable[[onnx.ModelProto], dict[str, onnx.ModelProto]]
"""Makes the forms of the training graph, by the names of their files, from a forward graph with its loss."""


@dataclass(frozen=True)
class Held:
    """The tensors of one part of one stage."""

    tensors: Sequence[str]
    """Names of the tensors."""
    regions: Mapping[str, Region]
    """Regions of those that are divided."""


@dataclass(frozen=True)
class Divided:
    """The parts of all ranks, in memory."""

    division: Division
    files: Mapping[str, bytes]
    """Path in the folder of the whole model's graphs -> content."""
    notes: Sequence[str]


def divide(
    spec: TrainerRunSpec,
    root: Path,
    whole: FlatIndex,
    prepared: onnx.ModelProto,
    evaluate: onnx.ModelProto,
    trained: Sequence[str],
    length: int,
    train_graph: TrainGraph,
    *,
    parts: Collection[int] | None = None,
    lengths: Mapping[str, int] | None = None,
    measured: NodeCosts | None = None,
) -> Divided:
    """Divide a model as the run file requests.

    Parameters
    ----------
    spec
        The run file.
    root
        Folder of the whole model's graphs.
    whole
        Their index.
    prepared
        The forward graph in training mode; outputs are the loss and the new running statistics.
    evaluate
        The evaluation graph.
    trained
        Parameters that have a gradient.
    length
        Length of the samples if the model's second axis is dynamic; 0 if unknown.
    train_graph
        Differentiates a forward graph that is not cut into stages.
    parts
        The parts whose graphs are made, at least part 0; all if None. What each holds is determined in any case.
    lengths
        Input of the model -> size of its second axis in all samples, where it is dynamic and known.
    measured
        Costs of the nodes of `prepared`; by default they are counted.

    Raises
    ------
    UserError
        If the model cannot be divided like this.
    """
    section, cuts = spec.parallel, spec.parallel.cuts
    holdings: list[list[Held]] = []
    files: dict[Path, bytes] = {}
    collectives: list[dict[str, list[Kind]]] = []
    notes: list[str] = []
    for part in range(section.horizontal):
        lines: list[str] = []
        forward, evaluated, regions = prepared, evaluate, dict[str, Region]()
        if section.horizontal > 1:
            forward, evaluated, regions, lines = _part_of(spec, whole, prepared, evaluate, trained, part, lengths)
        if parts is not None and part not in parts:
            # The parts of a stage have the same tensors.
            first = [holdings[0][stage].tensors for stage in range(section.pipeline)]
            holdings.append([_held(names, regions) for names in first])
            continue
        folder = folder_of(root, part)
        if section.pipeline == 1:
            graphs = {**train_graph(forward), "eval.onnx": evaluated}
            files |= {folder / name: _finished(model, on_gpus=spec.on_gpus) for name, model in graphs.items()}
            holdings.append([Held([entry.name for entry in whole], regions)])
        else:
            # The parts of a stage run in step: all are cut where the first is.
            cut = _staged(spec, whole, forward, evaluated, trained, cuts, length, folder, measured)
            cuts = cut.cuts
            files |= cut.files
            graphs = {}
            if section.horizontal > 1:
                graphs = {p.name: onnx.load_from_string(data) for p, data in cut.files.items() if p.suffix == ".onnx"}
            lines += cut.notes
            holdings.append([_held(names, regions) for names in _tensors_of(cut, whole, section.pipeline)])
        collectives.append({name: _collectives(model) for name, model in graphs.items()})
        notes += lines if not part else ()
    check_alike(collectives)
    ordered = [holdings[part][stage] for stage in range(section.pipeline) for part in range(section.horizontal)]
    try:
        division = division_of(whole, spec.grid, ordered)
        for rank in range(spec.grid.world_size):
            ties(division, spec.grid.place(rank))
    except ValueError as error:
        raise UserError(str(error), where="parallel", fix="set pipeline or horizontal to 1") from error
    contents = {path.relative_to(root).as_posix(): content for path, content in files.items()}
    return Divided(division, {**contents, NAME: json.dumps(division.to_json()).encode()}, notes)


def _part_of(
    spec: TrainerRunSpec,
    index: FlatIndex,
    prepared: onnx.ModelProto,
    evaluate: onnx.ModelProto,
    trained: Sequence[str],
    part: int,
    lengths: Mapping[str, int] | None,
) -> tuple[onnx.ModelProto, onnx.ModelProto, dict[str, Region], list[str]]:
    """The forward and the evaluation graph of one part, its regions of the divided tensors, and log lines."""
    shapes = {entry.name: entry.tensor.shape for entry in index}
    parts = spec.parallel.horizontal
    section = spec.parallel
    layers = {"whole": section.whole, "columns": section.columns, "rows": section.rows}
    forward = divide_layers(prepared, shapes, trained, LOSS_SUM, part, parts, CHANNEL, named=layers)
    evaluated = divide_layers(evaluate, shapes, (), LOSS_SUM, part, parts, CHANNEL, like=forward)
    regions = {name: region for name, region in forward.regions.items() if not region.whole}
    notes = list(forward.notes)
    if section.sequence_parallel:
        held_shapes = {name: forward.regions[name].shape(shape) for name, shape in shapes.items()}
        notes += share_tokens(
            forward.model, held_shapes, trained, LOSS_SUM, forward.sums, part, parts, CHANNEL, lengths
        )
    return forward.model, evaluated.model, regions, notes


def _staged(
    spec: TrainerRunSpec,
    index: FlatIndex,
    forward: onnx.ModelProto,
    evaluated: onnx.ModelProto,
    trained: Sequence[str],
    cuts: Sequence[Sequence[str]] | None,
    length: int,
    folder: Path,
    measured: NodeCosts | None,
) -> StageGraphs:
    """The stages of one part, at `cuts` if they are known."""
    section = spec.parallel
    stages = Stages(
        section.pipeline, section.chunks, cuts, spec.data.micro_batch, length,
        spec.onnx_model.recomputed_scopes, spec.train.precision if spec.on_gpus else None, measured,
    )  # fmt: skip
    weights = [entry.name for entry in index]
    try:
        return build_stages(forward, evaluated, weights, trained, stages, folder)
    except UserError as error:
        if cuts is not None or measured is None or not measured.known:
            raise
        staged = build_stages(forward, evaluated, weights, trained, replace(stages, measured=None), folder)
        line = f"cut by counted operations, because the model cannot be cut where the measured time says: {error.what}"
        return replace(staged, notes=(*staged.notes, line))


def _tensors_of(cut: StageGraphs, index: FlatIndex, stages: int) -> list[list[str]]:
    """The tensors of each stage."""
    tensors = [cut.stages.tensors_of(stage) for stage in range(stages)]
    read = set[str]().union(*tensors)
    # What only other outputs of the model are computed with is saved and exported all the same.
    tensors[0] += [entry.name for entry in index if entry.name not in read]
    return tensors


def _held(names: Sequence[str], regions: Mapping[str, Region]) -> Held:
    return Held(names, {name: regions[name] for name in names if name in regions})


def _finished(model: onnx.ModelProto, *, on_gpus: bool) -> bytes:
    """The graph as ranks load it."""
    if has_collectives(model):
        gather_again(model.graph)
        finish(model)
        if on_gpus:
            on_gpu(model)
    return bytes(model.SerializeToString(deterministic=True))


def _collectives(model: onnx.ModelProto) -> list[Kind]:
    """The collectives of a graph in the order in which they run."""
    return [kind_of(node) for node in model.graph.node if is_collective(node)]


def check_alike(collectives: Sequence[Mapping[str, Sequence[Kind]]]) -> None:
    """Raise UserError if parts run other collectives than the first one does: they would wait for each other for ever.

    Parameters
    ----------
    collectives
        Of each part, by the name of its graphs.
    """
    first = collectives[0]
    for part, kinds in enumerate(collectives):
        unlike = [name for name in {**first, **kinds} if first.get(name) != kinds.get(name)]
        if unlike:
            raise UserError(
                f"the parts 0 and {part} of {unlike[0]} do not run the same collectives in the same order",
                where="parallel.horizontal",
                fix="set it to 1, and report the model to ortflow",
            )


def division_of(whole: FlatIndex, grid: Grid, holdings: Sequence[Held]) -> Division:
    """The division. Tensors with several holdings come last within their group.

    The elements that a sum over all ranks counts on a rank are then one or two pieces of its flat buffer. The parts of
    a stage have their tensors at the same offsets: replicas sum them in the same order, and tensors that parts share
    stay equal.
    """
    holders: dict[str, int] = {}
    for holding in holdings:
        for name in holding.tensors:
            holders[name] = holders.get(name, 0) + 1

    def index(holding: Held) -> FlatIndex:
        tensors = [entry.tensor for entry in whole if entry.name in set(holding.tensors)]
        # The parts hold different elements of a divided tensor: only other stages hold the same ones.
        parts = {t.name: grid.horizontal if t.name in holding.regions else 1 for t in tensors}
        tensors.sort(key=lambda tensor: holders[tensor.name] > parts[tensor.name])
        return FlatIndex.place(
            Tensor(t.name, holding.regions.get(t.name, WHOLE).shape(t.shape), t.group) for t in tensors
        )

    return Division(whole, grid, tuple(Holding(index(holding), dict(holding.regions)) for holding in holdings))
