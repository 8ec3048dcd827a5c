"""Training graphs as `ortflow.workflow.cuda.place` receives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import onnx
from graph_build_models import built

from ortflow.workflow.assembly import targets
from ortflow.workflow.graph.types import GraphSet


def differentiated(model: Path, **changes: Any) -> tuple[GraphSet, onnx.ModelProto]:
    """The graphs of a model, and its training graph as `place` receives it."""
    seen: list[onnx.ModelProto] = []
    real = targets.with_kernels

    def spy(graph: onnx.ModelProto, length: int = 0) -> onnx.ModelProto:
        seen.append(onnx.ModelProto.FromString(graph.SerializeToString()))
        return real(graph, length)

    with mock.patch.object(targets, "with_kernels", spy):
        graphs = built(model, **changes)
    return graphs, seen[0]
