"""Dropout whose mask is a function of a seed, the number of the dropout and the place of the element; see dropout.c.

Dropout (seed, number, x) -> y: x times `scale` where the random word of an element is at least `dropped`, and 0
elsewhere; seed and number are int64 [1]. The gradient is the same node of the gradient of y, and so is what the
backward pass recomputes: no mask is stored. The word of element i is word i mod 4 of Philox-4x32-10 (Salmon et al.
2011) with the seed as its key and the counter (i div 4, its high word, number, 0), in the order of the tensor's
elements. CPUs and GPUs draw the same. The number is an input so that kernels of equal dropouts have the same source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.ir.origin import DROPOUT
from ortflow.workflow.graph.ir.rewriter import Rewriter
from ortflow.workflow.graph.types import SEED

OPERATOR = "Dropout"
WORDS = 1 << 32
"""Number of the values of a random word."""


def put(rewriter: Rewriter) -> None:
    """Replace every Dropout that `objective.modes` has numbered, its gradients, and what recomputes it."""
    numbers: dict[int, str] = {}
    for node in rewriter.nodes(OPERATOR):
        drawn = drawn_by(rewriter, node)
        if drawn is None:
            continue
        number, flags = drawn[0], attributes(drawn[1])
        if number not in numbers:
            # Not shared with shapes and axes, which lie in the host's memory.
            numbers[number] = f"ortflow.dropout.{number}"
            rewriter.graph.initializer.append(numpy_helper.from_array(np.array([number], np.int64), numbers[number]))
        seeds = [SEED, numbers[number]]
        x, y, mask = node.input[0], node.output[0], [*node.output, ""][1]
        again = [pair for reader in rewriter.readers(mask) for pair in _again(rewriter, reader, mask, flags["scale"])]
        for gone, _, _ in again:
            rewriter.drop(*gone)
        rewriter.drop(node)
        for source, target in ((x, y), *((source, target) for _, source, target in again)):
            rewriter.describe(target, TensorProto.FLOAT, rewriter.dims(source))
            rewriter.add(OPERATOR, [*seeds, source], [target], **flags)
        if mask and rewriter.is_read(mask):
            shape, unit = rewriter("Shape", x, output=f"{mask}/shape"), numpy_helper.from_array(np.ones(1, np.float32))
            ones, positions = rewriter("ConstantOfShape", shape, output=f"{mask}/ones", value=unit), f"{mask}/kept"
            for name in (ones, positions):
                rewriter.describe(name, TensorProto.FLOAT, rewriter.dims(x))
            rewriter.add(OPERATOR, [*seeds, ones], [positions], **flags)
            rewriter("Cast", positions, output=mask, to=TensorProto.BOOL)
    give_seed(rewriter.graph, rewriter.all_nodes())


def drawn_by(rewriter: Rewriter, node: onnx.NodeProto) -> tuple[int, float] | None:
    """Number and ratio of a Dropout; None if it stays: it has no number, another type, or no known ratio."""
    number = next((int(prop.value) for prop in node.metadata_props if prop.key == DROPOUT), None)
    x, ratio_name, training_name = [*node.input, "", ""][:3]
    ratio, training = rewriter.value(ratio_name), rewriter.value(training_name)
    if number is None or ratio is None or training is None or not training.all() or not rewriter.is_fp32(x):
        return None
    return number, float(ratio.reshape(-1)[0])


def attributes(ratio: float) -> dict[str, int | float]:
    """The attributes of a node that drops a share of its input, 0 up to but not 1."""
    return {"dropped": min(round(ratio * WORDS), WORDS - 1), "scale": 1 / (1 - ratio)}


def give_seed(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    """Add the input SEED if a node reads it, and the graph does not have it yet."""
    if any(SEED in node.input for node in nodes) and all(value.name != SEED for value in graph.input):
        graph.input.append(helper.make_tensor_value_info(SEED, TensorProto.INT64, [1]))


_Again = tuple[list[onnx.NodeProto], str, str]
"""Nodes that apply a mask, what they apply it to, and the result."""


def _again(rewriter: Rewriter, reader: onnx.NodeProto, mask: str, scale: float) -> Iterator[_Again]:
    """What a reader of a mask begins: the gradient, as `autodiff.dropout` writes it, or what `recompute` writes."""
    if reader.op_type == "Where" and reader.input[0] == mask:
        scaled, zero = rewriter.made_for(reader, reader.input[1], "Mul"), rewriter.value(reader.input[2])
        if scaled is not None and zero is not None and not zero.any() and _is(rewriter, scaled.input[1], scale):
            yield [reader, scaled], scaled.input[0], reader.output[0]
    elif reader.op_type == "Or" and reader.input[0] == mask:
        gated, cast = rewriter.made_for(reader, reader.input[1], "And"), rewriter.only_reader(reader.output[0])
        product = rewriter.only_reader(cast.output[0]) if cast is not None and cast.op_type == "Cast" else None
        if gated is None or gated.input[0] != mask or cast is None or product is None or product.op_type != "Mul":
            return
        scaled = rewriter.made_for(product, product.input[0], "Div")
        if scaled is not None and product.input[1] == cast.output[0] and _is(rewriter, scaled.input[1], 1 / scale):
            yield [reader, gated, cast, product, scaled], scaled.input[0], product.output[0]


def _is(rewriter: Rewriter, name: str, number: float) -> bool:
    """Whether a value is a constant number, rounded."""
    value = rewriter.value(name)
    return value is not None and value.size == 1 and math.isclose(float(value.reshape(-1)[0]), number, rel_tol=1e-6)
