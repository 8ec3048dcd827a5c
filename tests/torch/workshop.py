"""Exports of the zoo and their graphs, cached for all tests of a session."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import exporters
import further_models
import image_models
import recurrent_models
import text_models
from case import Case
from flat import graphs_of
from reference import OPTIMIZER, Curve, torch_curve

from ortflow.workflow.graph.types import GraphSet

CASES: dict[str, Case] = {
    case.name: case for zoo in (text_models, image_models, recurrent_models, further_models) for case in zoo.cases()
}
EXPORTERS = {
    "for_training": lambda opset: exporters.for_training,
    "torchscript": exporters.torchscript,
    "torchscript-default": exporters.torchscript_default,
    "dynamo": exporters.dynamo,
    "dynamo-default": exporters.dynamo_default,
    "dynamo-unoptimized": exporters.dynamo_unoptimized,
}


@dataclass(frozen=True)
class Workshop:
    """Makes each file once, in `root`."""

    root: Path

    @cache  # noqa: B019 - there is one, for the session
    def model(self, name: str, exporter: str, opset: int) -> Path:
        """The file of a case from an exporter."""
        path = self.root / f"{name}-{exporter}-{opset}" / "model.onnx"
        path.parent.mkdir()
        # TorchScript prints the graph of what it cannot export.
        with contextlib.redirect_stdout(io.StringIO()):
            EXPORTERS[exporter](opset)(CASES[name], CASES[name].module(), path)
        return path

    @cache  # noqa: B019
    def graphs(self, name: str, exporter: str, opset: int) -> GraphSet:
        """The graphs that configure builds from it."""
        path, case = self.model(name, exporter, opset), CASES[name]
        return graphs_of(path, case.loss, OPTIMIZER, path.parent / "graphs", labels=case.labels)

    @cache  # noqa: B019
    def curve(self, name: str) -> Curve:
        """PyTorch's own run of the case."""
        return torch_curve(CASES[name])
