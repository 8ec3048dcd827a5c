"""The training and evaluation graph of a loss alone: its prediction is x + p, and p is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from graph_build_models import Array, run_graph
from onnx import TensorProto, helper
from pydantic import TypeAdapter

from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir.edit import make_outputs, scalar
from ortflow.workflow.graph.objective.loss import attach
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, VALID
from ortflow.workflow.spec.model import Loss

Shapes = Mapping[str, Sequence[int]]
"""Output -> its shape without the batch."""


def forward(shapes: Shapes, samples: int) -> onnx.ModelProto:
    """Each output NAME is NAME.x + NAME.p, of [samples, *shape]."""
    nodes, inputs, outputs = [], [], []
    for name, shape in shapes.items():
        nodes.append(helper.make_node("Add", [f"{name}.x", f"{name}.p"], [name], name=f"/{name}"))
        inputs.append(helper.make_tensor_value_info(f"{name}.x", TensorProto.FLOAT, ["batch", *shape]))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape]))
    inputs += [helper.make_tensor_value_info(f"{n}.p", TensorProto.FLOAT, [samples, *s]) for n, s in shapes.items()]
    graph = helper.make_graph(nodes, "model", inputs, outputs)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def section(loss: Mapping[str, Any]) -> Any:
    """The section of a loss."""
    return TypeAdapter(Loss).validate_python(dict(loss))


def training_graph(
    loss: Mapping[str, Any], shapes: Shapes, samples: int, *, padded: bool = False, **options: Any
) -> onnx.ModelProto:
    """The graph of the loss and the gradients NAME.p_grad."""
    model = forward(shapes, samples)
    attach(model.graph, section(loss), f"{next(iter(shapes))}.x", padded, **options)
    make_outputs(model.graph, [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)])
    trained = [f"{name}.p" for name in shapes]
    model, _ = make_differentiable(model, trained, LOSS_SUM)
    model, _ = differentiate(model, trained, LOSS_SUM)
    return model


def feeds_of(
    predictions: Mapping[str, Array], labels: Mapping[str, Array], valid: int | None = None
) -> dict[str, Array]:
    """What the graphs read where the outputs are `predictions`."""
    feeds: dict[str, Array] = dict(labels)
    for name, values in predictions.items():
        feeds[f"{name}.x"], feeds[f"{name}.p"] = values, np.zeros_like(values)
    feeds[VALID] = np.array([next(iter(predictions.values())).shape[0] if valid is None else valid])
    return feeds


def compute(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> tuple[float, float, dict[str, Array]]:
    """The loss's sum, its weight, and the gradient of each output."""
    made = run_graph(model, feeds)
    gradients = {name.removesuffix(".p_grad"): array for name, array in made.items() if name.endswith(".p_grad")}
    return float(made[LOSS_SUM]), float(made[LOSS_WEIGHT]), gradients
