"""The forms of the graphs of a stage: for CPUs or GPUs, with ONNX Runtime's operators or ortflow's, in half precision.

Called by `stages`. A form is made of the graph of both passes, which is then divided into a forward and a backward
graph. Elementwise nodes are fused after that: a group with nodes of both passes could run in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.division.regather import gather_again
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.collective import drop_copies
from ortflow.workflow.graph.ir.edit import import_domain
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.on_cuda import on_cuda
from ortflow.workflow.graph.optimize.order import results_first
from ortflow.workflow.graph.types import fused_of, on_cuda_of, with_kernels_of
from ortflow.workflow.kernels.graph import with_kernels


@dataclass(frozen=True)
class Form:
    """One form of the graph of both passes."""

    both: onnx.ModelProto
    """Sorted."""
    path_of: Callable[[Path], Path]
    """Path of a graph -> path of its form."""
    finish: Callable[[onnx.ModelProto], onnx.ModelProto]
    """The last change to a graph that is made of it."""


def forms_of(model: onnx.ModelProto, length: int, *, on_gpus: bool) -> Iterator[Form]:
    """The forms of a differentiated stage.

    Parameters
    ----------
    model
        Both passes, before composition. Changed.
    length
        See `Division.length`.
    on_gpus
        Whether the run is on GPUs.
    """
    faster = None if on_gpus else with_kernels(model, length)
    if on_gpus:
        own = placed(model)
        gather_again(own.graph)
    plain = _composed(model)
    yield Form(plain, _same, _same_graph)
    if faster is not None:
        yield Form(_composed(faster), with_kernels_of, _same_graph)
    if on_gpus:
        adapted = on_cuda(plain)
        sort_nodes(adapted.graph)
        yield Form(adapted, on_cuda_of, _same_graph)
        yield Form(own, fused_of, fused)


def half_form(model: onnx.ModelProto, trained: list[str], precision: str) -> Form:
    """The form in half precision of a differentiated stage; see `ortflow.workflow.fusion.halved`."""
    from ortflow.workflow.fusion.halved import in_half

    both = in_half(model, trained, precision)
    sort_nodes(both.graph)
    gather_again(both.graph)
    return Form(both, _same, fused)


def placed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph of both passes with ortflow's operators for GPUs, sorted. `model` loses its copies of gradients."""
    from ortflow.workflow.cuda.place import completed
    from ortflow.workflow.fusion.joins import put_joins

    drop_copies(model.graph)
    own = put_joins(on_cuda(completed(model)))
    sort_nodes(own.graph)
    return own


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with fused elementwise nodes."""
    from ortflow.workflow.fusion import groups

    copy = groups.fused(model)
    import_domain(copy, CUDA_DOMAIN)
    return copy


def _composed(model: onnx.ModelProto) -> onnx.ModelProto:
    rewrites.after(model.graph)
    both = compose(model)
    results_first(both.graph)
    gather_again(both.graph)
    return both


def _same(path: Path) -> Path:
    return path


def _same_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    return model
