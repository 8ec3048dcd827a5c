"""Times the nodes of a forward graph, once for a run, to balance the stages of a pipeline.

Called by `build`, and by `variants` for `ortflow plan`. What was measured or found impossible is recorded, and every
later build cuts by the record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from ortflow.workflow.assembly.child import Child, RuntimeFault
from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.ir.edit import dims_of
from ortflow.workflow.graph.stages.balance import OTHER, shapes_of
from ortflow.workflow.graph.stages.costs import costs_for
from ortflow.workflow.graph.stages.node_costs import NAME, NodeCosts, key_of, result_of
from ortflow.workflow.graph.types import VALID
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.spec.run import TrainerRunSpec

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Timing:
    """How to measure."""

    batch: Callable[[Sequence[BatchInput]], Arrays]
    """Reads a micro-batch of the run: input -> samples. May raise OrtflowError."""
    threads: int
    """Cores of a rank."""


def wants_costs(spec: TrainerRunSpec) -> bool:
    """Whether a run cuts its model by measured costs: on CPUs, without named cuts."""
    return spec.parallel.pipeline > 1 and spec.parallel.cuts is None and not spec.on_gpus


def costs_of(
    prepared: onnx.ModelProto,
    weights: Mapping[str, npt.NDArray[np.generic]],
    inputs: Sequence[BatchInput],
    spec: TrainerRunSpec,
    length: int,
    folder: Path,
    child: Child | None,
    timing: Timing | None,
) -> NodeCosts | None:
    """The recorded costs of a run's nodes, or measured ones. None without a record if `child` or `timing` is None.

    Parameters
    ----------
    prepared
        The forward graph in training mode, with its loss.
    weights
        Its parameters and running statistics.
    inputs
        Of a batch.
    spec
        The run file.
    length
        Length of the samples if the model's second axis is dynamic; 0 if unknown.
    folder
        Of the graphs, with the record.
    child
        The process that measures.
    timing
        How to measure.
    """
    key = key_of(prepared, shapes_of(prepared.graph, weights, spec.data.micro_batch, length or OTHER))
    record = recorded(folder)
    if record is not None and record.key == key:
        return record
    if child is None or timing is None:
        return None
    try:
        batch = timing.batch(inputs)
        seconds = _measured(prepared, weights, batch, child, timing.threads, spec.data.micro_batch)
    except RuntimeFault as fault:
        return NodeCosts(key, {}, fault=_short(f"it crashed, {fault}" if fault.crashed else str(fault)))
    except (OrtflowError, OSError, ValueError) as error:
        return NodeCosts(key, {}, fault=_short(str(error)))
    shapes = {name: array.shape for name, array in batch.items()}
    costs = costs_for(prepared, shapes)
    timed = {place: prepared.graph.node[place] for place in sorted(seconds)}
    # What other programs add to the time of one layer, they hardly add to that of each.
    alike = {place: costs.likeness(node) or (place,) for place, node in timed.items()}
    fastest: dict[tuple[object, ...], float] = {}
    for place, kind in alike.items():
        fastest[kind] = min(seconds[place], fastest.get(kind, seconds[place]))
    nodes = {result_of(node): (fastest[alike[place]], costs.operations(node)) for place, node in timed.items()}
    measured = NodeCosts(key, nodes, shapes)
    return measured if measured.known else NodeCosts(key, {}, fault="the profiler recorded no time of any node")


def recorded(folder: Path) -> NodeCosts | None:
    """The record in a folder of graphs; None if there is none, or it is damaged."""
    try:
        return NodeCosts.from_bytes((folder / NAME).read_bytes())
    except (OSError, ValueError):
        return None


def copy_record(source: Path, target: Path) -> None:
    """Copy the record from one folder of graphs to another, if there is a whole one."""
    record = recorded(source)
    if record is not None:
        write_atomically(target / NAME, record.to_bytes())


def why_counted(costs: NodeCosts) -> str:
    """The warning about a failed measurement."""
    return (
        f"the nodes of the model cannot be timed ({costs.fault}): its stages are balanced by counted operations; "
        "parallel.cuts sets other cuts"
    )


def _measured(
    prepared: onnx.ModelProto, weights: Collection[str], batch: Arrays, child: Child, threads: int, rows: int
) -> dict[int, float]:
    """Seconds of the nodes, by their places in the graph.

    Those are missing that ONNX Runtime computes as several others.
    """
    model = onnx.ModelProto()
    model.CopyFrom(prepared)
    for number, node in enumerate(model.graph.node):
        node.name = _name(number)
    feeds, shapes = dict[str, npt.NDArray[np.generic]](), dict[str, list[int]]()
    for value in model.graph.input:
        name = str(value.name)
        dims = [dim if isinstance(dim, int) else rows for dim in dims_of(value) or ()]
        if name in weights:
            shapes[name] = dims
        elif name in batch:
            feeds[name] = batch[name]
        elif name == VALID:
            feeds[name] = np.array([rows], np.int64)
        else:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feeds[name] = np.ones(dims, dtype)
    seconds = child.profile(model.SerializeToString(), feeds, shapes, threads)
    names = {_name(number): number for number in range(len(model.graph.node))}
    return {names[name]: duration for name, duration in seconds.items() if name in names}


def _name(number: int) -> str:
    return f"ortflow.node.{number}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else "… " + text[-200:]
