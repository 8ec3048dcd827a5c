"""The run file's `export` section: the inference model, or what a program hands over."""

from __future__ import annotations

from typing import Literal

from ortflow.workflow.spec.base import NonNegativeFloat, Section, Text


class ExportSection(Section):
    """The inference model made at the end."""

    path: Text = "export/model.onnx"
    """File, relative to the run directory."""
    tolerance: NonNegativeFloat | None = None
    """Largest difference from the trained model, absolute plus relative, on real samples; by default 1e-4, or the
    model's rounding if that is larger."""
    enabled: bool = True
    """Export after the last step."""
    optimize: bool = False
    """Also write `model.optimized.onnx`, with ONNX Runtime's fused operators, which other runtimes do not have."""
    quantize: Literal["int8", "fp16"] | None = None
    """Also write `model.int8.onnx` or `model.fp16.onnx`: smaller, and measured on real samples against the exported
    model. A model with convolutions is calibrated on them."""
    quantize_tolerance: NonNegativeFloat = 0.05
    """Largest difference of the quantised model's outputs, relative to the root of their mean square; beyond it the
    model is refused."""
    metric_tolerance: NonNegativeFloat = 0.02
    """How much worse the metric may be with the optimised or quantised model, relative to its value with the exported
    one; beyond it the model is refused. It is that of `checkpoint.best`, else the first of `model.metrics`, else the
    loss."""


class HandedOver(ExportSection):
    """What a program hands over at its end; ortflow records it and does not make it."""

    path: Text = "export"
    """File or folder, relative to the run directory."""
