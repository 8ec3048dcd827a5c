"""Gradients of look-ups, convolutions and normalised images by operators of ONNX: see `compose`."""

from __future__ import annotations

from collections.abc import Callable

from ortflow.workflow.graph.autodiff.indexing import gathered_back
from ortflow.workflow.graph.writer import Writer


def gather(w: Writer) -> None:
    """GatherGrad(shape, indices, gradient): zeros to which the gradient's rows are added."""
    shape, indices, gradient = w.node.input
    w.done(gathered_back(w, shape, indices, gradient, w.attribute("axis", 0)))


IMAGES: dict[str, Callable[[Writer], None]] = {"GatherGrad": gather}
