"""Dropout."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.sequence import Search, Shares, Whole, token_rule
from ortflow.workflow.graph.rules.spread import Cuts, Spread, division_rule
from ortflow.workflow.graph.rules.traits import Trait, describe


@gradient_rule("Dropout")
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


@division_rule("Dropout")
def dropout_of_parts(s: Spread, place: int, node: onnx.NodeProto, input_cuts: Cuts) -> Cuts:
    # `rewrite` draws the whole mask and takes this part's share.
    if any(input_cuts[1:]) or input_cuts[0] is None or input_cuts[0].varies:
        raise s.unsupported(node)
    return [input_cuts[0]] * len(node.output)


@token_rule("Dropout")
def dropout_of_tokens(s: Search, place: int, node: onnx.NodeProto, input_axes: Shares) -> Shares:
    # `sequence_graph` draws the whole mask and takes this part's share.
    if any(input_axes[1:]):
        raise Whole
    return [input_axes[0]] * len(node.output)


describe(["Dropout"], Trait.FIRST_DIVIDED)
