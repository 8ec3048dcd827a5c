"""Rule for Dropout."""

from __future__ import annotations

from ortflow.workflow.graph.autodiff.rule import Backward, Gradients, rule


@rule("Dropout")
def dropout(b: Backward) -> Gradients:
    """dx = dy times mask times the scale of the kept elements; outside training dx = dy."""
    ratio, training = b.value(1), b.value(2)
    if not b.input(2) or (training is not None and not training.any()):
        yield 0, b.gradient()
        return
    one = b.constant(1.0)
    if b.input(1) and ratio is None:
        scale = b("Reciprocal", b("Sub", one, b("Cast", b.input(1), to=1)))
    else:
        # ONNX's default.
        dropped = 0.5 if ratio is None else float(ratio)
        if dropped == 0:
            yield 0, b.gradient()
            return
        scale = b.constant(1 / (1 - dropped))
    if training is None:
        scale = b("Where", b.input(2), scale, one)
    yield 0, b("Where", b.saved_output(1), b("Mul", b.gradient(), scale), b.constant(0.0))
