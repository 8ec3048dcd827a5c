"""Opens the trainer of a divided model on one rank: communicators, this rank's graphs, its regions of the tensors.

Called by `builder` on all ranks together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.grid import GridRanks
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.kernels.library import remedy
from ortflow.workflow.parallel.division import CHANNEL, NAME, Division, Holding, folder_of
from ortflow.workflow.sessions.collectives import connect
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report
from ortflow.workflow.trainer.context import StepContext
from ortflow.workflow.trainer.opening import LAYOUTS, LOOPS, Assembly, Divided, LoopName, layout_of
from ortflow.workflow.trainer.step import GraphTrainer
from ortflow.workflow.trainer.tensors import FileTensors


def open_divided(
    graphs: GraphSet,
    spec: TrainerRunSpec,
    sessions: Sessions,
    communicator: Communicator,
    report: Report,
    *,
    loop: LoopName | None = None,
) -> GraphTrainer:
    """The trainer of this rank, with the parameters of the model file; collective over the communicator."""
    ranks = GridRanks.connect(communicator, spec.grid)
    division = division_of(graphs, spec)
    holding = division.of(ranks.place)
    rank_graphs = replace(graphs, root=folder_of(graphs.root, ranks.place.part), index=holding.index)
    if spec.parallel.horizontal > 1:
        _connect(sessions, {CHANNEL: ranks.parts})
    context = StepContext(rank_graphs, spec, sessions, ranks.replicas, report)
    layout, divided = LAYOUTS[layout_of(spec)], Divided(graphs, ranks, division)
    trainer = Assembly(context, layout, loop or LOOPS[sessions.device.kind], divided).trainer()
    trainer.load_tensors(RegionTensors(holding, FileTensors(graphs.initial)))
    if communicator.rank == 0:
        report.note(_summary(division))
    return trainer


class RegionTensors(Mapping[str, "npt.NDArray[np.float32]"]):
    """The regions that a rank holds of whole tensors, flat; each is read on access."""

    def __init__(self, holding: Holding, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
        self._holding, self._tensors = holding, tensors

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        region = self._holding.region(name).of(self._tensors[name])
        return np.ascontiguousarray(region, np.float32).reshape(-1)

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._holding.index)

    def __len__(self) -> int:
        return len(self._holding.index)


def _connect(sessions: Sessions, channels: Mapping[int, Communicator]) -> None:
    """Let the collectives of graphs use communicators. Raises UserError if this machine lacks what computes them."""
    from ortflow.workflow.device.cuda import CudaDevice

    device = sessions.device
    if isinstance(device, CudaDevice) and sessions.operators is not None:
        from ortflow.workflow.sessions.gpu_collectives import serve

        serve(sessions.operators, device, channels)
    elif not isinstance(device, CudaDevice) and sessions.library is not None:
        connect(sessions.library, channels)
    else:
        raise UserError(
            "is above 1, and this machine has no kernels of ortflow's, which sum over parts",
            where="parallel.horizontal",
            fix=f"{remedy()}, or set it to 1",
        )


def division_of(graphs: GraphSet, spec: TrainerRunSpec) -> Division:
    """The division of the graphs, on the grid of this attempt, whose replicas may be more or fewer than before."""
    data = json.loads((graphs.root / NAME).read_text(encoding="utf-8"))
    return Division.from_json(graphs.index, data, spec.grid)


def _summary(division: Division) -> str:
    """Number of elements that the ranks of each part of each stage hold."""
    counts = ", ".join(f"{sum(entry.tensor.count for entry in holding.index):,}" for holding in division.holdings)
    total = sum(entry.tensor.count for entry in division.whole)
    grid = division.grid
    return (
        f"{grid.data} replica(s) of {grid.pipeline} stage(s) x {grid.horizontal} part(s); of {total:,} elements they "
        f"hold {counts}"
    )
