"""Builds what the ranks of a divided model hold: for each part of each stage its graphs and its tensors.

Called by `build` behind the graphs of the whole model, whose index stays the form of checkpoints and exports.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.assembly.stages import Division as Stages
from ortflow.workflow.assembly.stages import build_stages
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.parallel.division import NAME, Division, Holding, folder_of
from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.parallel.region import WHOLE, Region
from ortflow.workflow.rundir import write_atomically
from ortflow.workflow.spec.run import RunSpec

TrainGraph = Callable[[onnx.ModelProto], tuple[onnx.ModelProto, onnx.ModelProto]]
"""From a forward graph with its loss to the training graph, and the same with our own operators."""


@dataclass(frozen=True)
class Held:
    """The tensors of one part of one stage."""

    tensors: Sequence[str]
    """Names."""
    regions: Mapping[str, Region]
    """Of those that are divided."""


@dataclass(frozen=True)
class Divided:
    """What all ranks hold, in memory."""

    division: Division
    files: Mapping[Path, bytes]
    notes: Sequence[str]

    def write(self, root: Path) -> None:
        """Write everything into the folder of the whole model's graphs; whatever an earlier attempt left is removed."""
        for folder in root.glob("part-*"):
            shutil.rmtree(folder)
        for part in range(self.division.grid.horizontal):
            folder_of(root, part).mkdir(parents=True)
        for path, content in self.files.items():
            write_atomically(path, content)
        write_atomically(root / NAME, json.dumps(self.division.to_json()).encode())


def divide(
    spec: RunSpec,
    root: Path,
    whole: FlatIndex,
    prepared: onnx.ModelProto,
    evaluate: onnx.ModelProto,
    trained: Sequence[str],
    length: int,
) -> Divided:
    """Divide a model as the run file says.

    Parameters
    ----------
    spec
        The run file.
    root
        Folder of the whole model's graphs.
    whole
        Their index.
    prepared
        The forward graph in training mode, its outputs the loss and the new running statistics.
    evaluate
        The evaluation graph.
    trained
        Parameters that have a gradient.
    length
        That of the samples where the model's second axis varies; 0 if it is not known.

    Raises
    ------
    UserError
        If the model cannot be divided so.
    """
    names = [entry.name for entry in whole]
    section = spec.parallel
    held: list[list[Held]] = []
    files: dict[Path, bytes] = {}
    notes: list[str] = []
    for part in range(section.horizontal):
        stages = Stages(
            section.pipeline, section.chunks, section.cuts, spec.data.micro_batch, length, spec.onnx_model.recompute
        )
        made = build_stages(prepared, evaluate, names, trained, stages, folder_of(root, part))
        files |= made.files
        notes += made.notes if not part else ()
        held.append([Held(made.stages.tensors_of(stage), {}) for stage in range(section.pipeline)])
    ordered = [held[part][stage] for stage in range(section.pipeline) for part in range(section.horizontal)]
    return Divided(division_of(whole, spec.grid, ordered), files, notes)


def division_of(whole: FlatIndex, grid: Grid, held: Sequence[Held]) -> Division:
    """The division, in which tensors of several holdings lie behind the others of their group.

    What a sum over all ranks counts on a rank is then a piece or two of its flat buffer. The parts of a stage have
    their tensors at the same places: replicas sum them in the same order, and what parts have in common stays equal.
    """
    holders: dict[str, int] = {}
    for each in held:
        for name in each.tensors:
            holders[name] = holders.get(name, 0) + 1

    def index(each: Held) -> FlatIndex:
        there = [entry.tensor for entry in whole if entry.name in set(each.tensors)]
        # Of a divided tensor each part has its own elements: only other stages hold the same.
        parts = {t.name: grid.horizontal if t.name in each.regions else 1 for t in there}
        there.sort(key=lambda tensor: holders[tensor.name] > parts[tensor.name])
        return FlatIndex.place(Tensor(t.name, each.regions.get(t.name, WHOLE).shape(t.shape), t.group) for t in there)

    return Division(whole, grid, tuple(Holding(index(each), dict(each.regions)) for each in held))
