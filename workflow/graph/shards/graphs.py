"""The graphs of a run with nodes that fetch parameters and send gradients. Called by the trainer that runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.graph.ir.order import needed_by
from ortflow.workflow.graph.shards.ahead import with_gathers
from ortflow.workflow.graph.shards.fetch_nodes import with_exchange
from ortflow.workflow.graph.shards.layer_groups import Layer, layers_of
from ortflow.workflow.graph.shards.program import GRADIENT, Program
from ortflow.workflow.layout import TRAINED, FlatIndex


@dataclass(frozen=True)
class Sharded:
    """Training and evaluation graph, and the program of each."""

    layers: Sequence[Layer]
    train: tuple[onnx.ModelProto, Program]
    eval: tuple[onnx.ModelProto, Program]
    another: Callable[[onnx.ModelProto, int], tuple[onnx.ModelProto, Program]]
    """Makes the same of another graph of the model, for a channel."""


def sharded(train: Path, form: Path, evaluate: Path, index: FlatIndex, *, on_gpus: bool = False) -> Sharded:
    """Make the sharded graphs from the training graph in the form that is run, and from the evaluation graph.

    Parameters
    ----------
    train
        The training graph in ONNX operators, whose nodes have the model's names.
    form
        The training graph as it is run.
    evaluate
        The evaluation graph.
    index
        The tensors.
    on_gpus
        Whether the ranks compute on GPUs.
    """
    rewrite = with_gathers if on_gpus else with_exchange
    shapes = {entry.name: entry.tensor.shape for entry in index if entry.tensor.group in TRAINED}
    layers = layers_in(onnx.load(train).graph, index)

    def another(model: onnx.ModelProto, channel: int) -> tuple[onnx.ModelProto, Program]:
        return rewrite(model, layers, shapes, channel)

    return Sharded(layers, another(onnx.load(form), 0), another(onnx.load(evaluate), 1), another)


def layers_in(train: onnx.GraphProto, index: FlatIndex) -> list[Layer]:
    """The layers of the trained parameters, by their use in the forward pass of the training graph."""
    nodes = list(train.node)
    ends = [value.name for value in train.output if not value.name.endswith(GRADIENT)]
    forward = needed_by(nodes, ends)
    counts = {entry.name: entry.tensor.count for entry in index if entry.tensor.group in TRAINED}
    return layers_of((node for place, node in enumerate(nodes) if place in forward), counts)
