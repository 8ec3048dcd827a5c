"""The forms of the graphs of a stage: for CPUs or GPUs, with ONNX Runtime's operators or ortflow's, in half precision.

Called by `stages`. A form is made of the graph of both passes, which is then divided into a forward and a backward
graph. Elementwise nodes are fused after that: a group with nodes of both passes could run in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx

from ortflow.workflow.assembly import targets
from ortflow.workflow.graph.division.regather import gather_again
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.edit import import_domain
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.ir.passes import copied


@dataclass(frozen=True)
class StageForm:
    """One form of the graph of both passes."""

    both: onnx.ModelProto
    """Sorted."""
    form: Form
    finish: Callable[[onnx.ModelProto], onnx.ModelProto] = lambda model: model
    """The last change to a graph that is made of it."""


@dataclass(frozen=True)
class _Length:
    length: int


def forms_of(model: onnx.ModelProto, length: int, *, on_gpus: bool) -> Iterator[StageForm]:
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
    if not on_gpus:
        yield StageForm(targets.STAGE.run(copied(model), None), Form.PLAIN)
        yield StageForm(targets.STAGE_KERNELS.run(model, _Length(length)), Form.KERNELS)
        return
    kernels = placed(model)
    gather_again(kernels.graph)
    plain = targets.STAGE.run(model, None)
    yield StageForm(plain, Form.PLAIN)
    yield StageForm(targets.STAGE_CUDA.run(plain, None), Form.CUDA)
    yield StageForm(kernels, Form.FUSED, fused)


def half_form(model: onnx.ModelProto, trained: list[str], precision: str) -> StageForm:
    """The form in half precision of a differentiated stage, under the name of the graph itself; see
    `ortflow.workflow.fusion.halved`.
    """
    from ortflow.workflow.fusion.halved import in_half

    graph = in_half(model, trained, precision)
    sort_nodes(graph.graph)
    gather_again(graph.graph)
    return StageForm(graph, Form.PLAIN, fused)


def placed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph of both passes with ortflow's operators for GPUs, sorted. `model` loses its copies of gradients."""
    return targets.STAGE_PLACED.run(model, None)


def fused(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with fused elementwise nodes."""
    from ortflow.workflow.fusion import groups

    copy = groups.fused(model)
    import_domain(copy, CUDA_DOMAIN)
    return copy
