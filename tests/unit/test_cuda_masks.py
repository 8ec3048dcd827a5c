"""Masks of activations between a convolution that stays first in channels and one of ours, as in MobileNet."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from differentiated_models import differentiated
from onnx import TensorProto
from test_cuda_images import CHANNELS, Model, check_graph

from ortflow.workflow.cuda.place import completed
from ortflow.workflow.cuda.table import HALF, HALF_ONLY
from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.fusion.half import half
from ortflow.workflow.graph.ir.edit import described

ACTIVATIONS = ["HardSwish", "HardSigmoid", "LeakyRelu", "Relu", "Elu", "Selu", "Celu", "ThresholdedRelu"]


def mobile(path: Path, activation: str) -> Path:
    """A depthwise convolution of ONNX Runtime, an activation, and a pointwise convolution of ours."""
    m = Model()
    x = m.norm(m.convolution("x", 3, CHANNELS, 3, pads=[1, 1, 1, 1]), CHANNELS)
    deep = m.convolution(x, CHANNELS, CHANNELS, 3, group=CHANNELS, pads=[1, 1, 1, 1])
    return m.save(path, m.convolution(m.add(activation, deep), CHANNELS, CHANNELS, 1))


def booleans(model: onnx.ModelProto) -> set[str]:
    """The values that are bool, whatever the graph says: conditions, and what only moves them."""
    found = set[str]()
    for node in model.graph.node:
        moves = node.op_type in ("Transpose", "Reshape", "Identity") and node.input[0] in found
        if moves or node.op_type in ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "And", "Or", "Not"):
            found.update(node.output)
    return found


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_mask_stays_a_mask(activation: str, kind: int, tmp_path: Path) -> None:
    graphs, model = differentiated(mobile(tmp_path / "m.onnx", activation))
    check_graph(graphs, model)
    trained = [entry.name for entry in graphs.index if entry.tensor.group in ("decay", "no_decay")]
    stored = half(completed(model, halves=True), kind, trained, HALF, HALF_ONLY)
    fused, _ = fuse(stored)
    for form in (stored, fused):
        masks, kinds = booleans(form), described(form.graph)
        for name in masks & kinds.keys():
            assert kinds[name].type.tensor_type.elem_type == TensorProto.BOOL, name
        halves = [
            node.input[0]
            for node in form.graph.node
            if node.op_type == "Cast" and node.attribute[0].i in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        ]
        assert masks.isdisjoint(halves)
