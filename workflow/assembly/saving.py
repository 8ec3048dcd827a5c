"""What `model.recompute` saves and costs, predicted from the training graph with and without it. Called by `build`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from ortflow.workflow.assembly.files import give_inputs
from ortflow.workflow.assembly.targets import CUDA, FUSED
from ortflow.workflow.assembly.training import Training
from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.passes import copied
from ortflow.workflow.graph.memory.forms import forms_of
from ortflow.workflow.graph.memory.peak_memory import peak_of
from ortflow.workflow.graph.memory.peak_memory import sizes_of as bytes_of
from ortflow.workflow.graph.stages.costs import costs_for
from ortflow.workflow.spec.run import TrainerRunSpec

Shapes = Mapping[str, Sequence[int]]


def batch_shapes(
    inputs: Sequence[BatchInput], rows: int, length: int, lengths: Mapping[str, int]
) -> dict[str, tuple[int, ...]] | None:
    """Shapes of a micro-batch's arrays; None if an axis varies from sample to sample.

    Parameters
    ----------
    inputs
        The arrays.
    rows
        Samples.
    length, lengths
        As in `build_graphs`.
    """
    shapes = {}
    for value in inputs:
        size = lengths.get(value.name, length)
        dims = [rows, *(size if dim is None else dim for dim in value.shape[1:])]
        if not all(dims) or sum(dim is None for dim in value.shape[1:]) > 1:
            return None
        shapes[value.name] = tuple(dims)
    return shapes


def saving(
    recomputed: Training,
    kept: Training,
    batch: Shapes,
    inputs: Sequence[onnx.ValueInfoProto],
    *,
    kernels: bool,
    whole: str = "",
) -> str:
    """A line for the log.

    Parameters
    ----------
    recomputed, kept
        The training graph with recomputation, and without.
    batch
        Shapes of a micro-batch.
    inputs
        The inputs of the graphs, which they are given.
    kernels
        Whether ranks have ortflow's kernels.
    whole
        What these are the values of, if not of a rank.
    """
    for training in (recomputed, kept):
        for model in (training.plain, training.forms[training.form(kernels=kernels)]):
            give_inputs(model, inputs)
    now, before = (activations(graphs, batch, kernels=kernels) for graphs in (recomputed, kept))
    added = operations(recomputed.plain, batch) / max(1, operations(kept.plain, batch)) - 1
    change = f"{abs(before - now) / 1e6:.1f} MB {'less' if now <= before else 'more'}"
    return (
        f"model.recompute, predicted{whole}: activations {now / 1e6:.1f} MB in place of {before / 1e6:.1f} MB, "
        f"{change}; about {added:.0%} more operations a micro-batch"
    )


def activations(training: Training, batch: Shapes, *, kernels: bool) -> int:
    """Bytes of the training graph's values at their peak, in the form that ranks load."""
    form = training.form(kernels=kernels)
    model = training.forms[form]
    if Form.PLACED in training.forms and form is not Form.HALF:
        model = FUSED.run(copied(model), None) if kernels else CUDA.run(copied(model), None)
    forms = forms_of(training.plain, model, batch)
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    return peak_of(model.graph, bytes_of(forms.types), bound, forms.conditions).held


def operations(model: onnx.ModelProto, batch: Shapes) -> int:
    """Operations of a training graph that contains ONNX's operators alone, for inputs of these shapes."""
    costs = costs_for(model, batch)
    return sum(costs.operations(node) for node in model.graph.node)


def without_recomputation(spec: TrainerRunSpec) -> TrainerRunSpec:
    """The run with all values kept."""
    return spec.model_copy(update={"model": spec.onnx_model.model_copy(update={"recompute": []})})
