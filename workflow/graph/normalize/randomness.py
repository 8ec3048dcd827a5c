"""Makes random operators functions of a seed, which the trainer sets for each run of a graph.

Called by `source` on the future training and evaluation graphs; the exported model keeps the file's operators. ONNX
Runtime's own operators are seeded when a session is opened and continue from run to run, so a resumed run would draw
other numbers. Here each number is a hash of the seed, the node, the iteration numbers of enclosing loops, and the
position in the tensor: splitmix64 (Steele, Lea and Flood 2014), in 64-bit integers that wrap.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.functions import fresh_names
from ortflow.workflow.graph.ir.replacement import Context, Replacement
from ortflow.workflow.graph.types import SEED

_GAMMA, _FIRST, _SECOND = (
    int(np.uint64(n).astype(np.int64)) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_STEP = 2.0**-24
"""Bits of a uniform number: fp32 represents every multiple of 2^-24 below 1."""


def seed_random_operators(model: onnx.ModelProto) -> bool:
    """Make a model draw its random numbers from a new input SEED, in place; returns whether it draws any.

    Raises UserError for a random operator in a Scan, whose iterations have no number.
    """
    is_random = any(_is_random(node) for node in walk.all_nodes(model))
    if is_random:
        _seed(model.graph, Context(fresh_names(model.graph), {}), [])
        model.graph.input.append(helper.make_tensor_value_info(SEED, TensorProto.INT64, [1]))
    return is_random


def _is_random(node: onnx.NodeProto) -> bool:
    return node.domain == "" and node.op_type in RANDOM


def _seed(graph: onnx.GraphProto, context: Context, iterations: Sequence[str]) -> None:
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in walk.subgraphs(node):
            within = [*iterations, inner.input[0].name] if node.op_type == "Loop" else iterations
            if node.op_type == "Scan" and any(_is_random(inner_node) for inner_node in walk.nodes(inner.node)):
                raise UserError(f"{walk.called(node)} draws random numbers that no seed can reproduce", fix="use Loop")
            _seed(inner, context, within)
        nodes += _written(node, context, iterations) if _is_random(node) else [node]
    replace(graph.node, nodes)


def _written(node: onnx.NodeProto, context: Context, iterations: Sequence[str]) -> list[onnx.NodeProto]:
    w = Replacement(node, context)
    return w.done(RANDOM[node.op_type](w, _Draw(w, iterations)))


class _Draw:
    """Random numbers for one node; `shape` is int64 [n]."""

    def __init__(self, w: Replacement, iterations: Sequence[str]) -> None:
        self._w, self._iterations = w, iterations

    def uniform(self, shape: str, stream: int = 0) -> str:
        """fp32 in [0, 1), multiples of 2^-24."""
        w = self._w
        top = w("BitShift", self._hashes(shape, stream), w.constant(40, np.uint64), direction="RIGHT")
        return w("Mul", w("Cast", top, to=TensorProto.FLOAT), w.constant(_STEP))

    def normal(self, shape: str) -> str:
        """fp32 of mean 0 and variance 1, by Box and Muller (1958)."""
        w = self._w
        # Above 0, so that the logarithm is finite.
        positive = w("Sub", w.constant(1.0), self.uniform(shape, 0))
        radius = w("Sqrt", w("Mul", w("Log", positive), w.constant(-2.0)))
        angle = w("Mul", self.uniform(shape, 1), w.constant(2 * math.pi))
        return w("Mul", radius, w("Cos", angle))

    def _hashes(self, shape: str, stream: int) -> str:
        w = self._w
        name = str(w.attribute("seed", "")) or w.node.name or w.node.output[0]
        digest = hashlib.blake2b(f"{name}/{stream}".encode(), digest_size=8).digest()
        key = w("Add", SEED, w.constant([int.from_bytes(digest, "little", signed=True)], np.int64))
        for number in self._iterations:
            key = w("Add", self._mixed(key), w("Reshape", number, w.ints(1)))
        count = w("ReduceProd", shape, keepdims=0)
        zero, one = w.constant(0, np.int64), w.constant(1, np.int64)
        places = w("Mul", w("Range", zero, count, one), w.constant(_GAMMA, np.int64))
        mixed = self._mixed(w("Add", self._mixed(key), places))
        return w("Reshape", w("Cast", mixed, to=TensorProto.UINT64), shape)

    def _mixed(self, value: str) -> str:
        """The last three steps of splitmix64."""
        w = self._w
        for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
            bits = w("Cast", value, to=TensorProto.UINT64)
            low = w("BitShift", bits, w.constant(shift, np.uint64), direction="RIGHT")
            value = w("Cast", w("BitwiseXor", bits, low), to=TensorProto.INT64)
            if factor is not None:
                value = w("Mul", value, w.constant(factor, np.int64))
        return value


def _given_shape(w: Replacement) -> str:
    return w.ints(*w.attribute("shape", []))


def _input_shape(w: Replacement) -> str:
    return w("Shape", w.input(0))


def _uniform(shape: Callable[[Replacement], str]) -> Callable[[Replacement, _Draw], str]:
    def write(w: Replacement, draw: _Draw) -> str:
        low, high = w.attribute("low", 0.0), w.attribute("high", 1.0)
        span = w("Mul", draw.uniform(shape(w)), w.constant(high - low))
        return _typed(w, w("Add", span, w.constant(low)))

    return write


def _normal(shape: Callable[[Replacement], str]) -> Callable[[Replacement, _Draw], str]:
    def write(w: Replacement, draw: _Draw) -> str:
        scaled = w("Mul", draw.normal(shape(w)), w.constant(w.attribute("scale", 1.0)))
        return _typed(w, w("Add", scaled, w.constant(w.attribute("mean", 0.0))))

    return write


def _bernoulli(w: Replacement, draw: _Draw) -> str:
    below = w("Less", draw.uniform(_input_shape(w)), w("Cast", w.input(0), to=TensorProto.FLOAT))
    return w("Cast", below, to=w.attribute("dtype", TensorProto.FLOAT))


def _multinomial(w: Replacement, draw: _Draw) -> str:
    """[rows, samples]: the first class whose cumulative probability exceeds a uniform number."""
    logits, samples = w.input(0), w.ints(w.attribute("sample_size", 1))
    above = w("CumSum", w("Softmax", logits, axis=-1), w.constant(1, np.int64))
    drawn = draw.uniform(w("Concat", w("Shape", logits, start=0, end=1), samples, axis=0))
    # Rounding may leave the last sum a little below 1, so the numbers are scaled by it.
    totals = w("Slice", above, w.ints(-1), w.ints(np.iinfo(np.int64).max), w.ints(1))
    passed = w("LessOrEqual", w("Unsqueeze", above, w.ints(1)), w("Unsqueeze", w("Mul", drawn, totals), w.ints(2)))
    places = w("ReduceSum", w("Cast", passed, to=TensorProto.INT64), w.ints(2), keepdims=0)
    return w("Cast", places, to=w.attribute("dtype", TensorProto.INT32))


def _typed(w: Replacement, value: str) -> str:
    kind = w.attribute("dtype", TensorProto.FLOAT)
    return value if kind == TensorProto.FLOAT else w("Cast", value, to=kind)


RANDOM: dict[str, Callable[[Replacement, Any], str]] = {
    "Bernoulli": _bernoulli,
    "Multinomial": _multinomial,
    "RandomNormal": _normal(_given_shape),
    "RandomNormalLike": _normal(_input_shape),
    "RandomUniform": _uniform(_given_shape),
    "RandomUniformLike": _uniform(_input_shape),
}
"""Operator -> the function that writes its replacement."""
