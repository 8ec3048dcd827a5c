"""Attention is found in hand-written graphs, only where that is proved, and computes the same as the nodes did."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import pytest
from composed_attention import compose_attention
from onnx import numpy_helper, parser

from ortflow.workflow.graph.attention.find import GRADIENT, OPERATOR, attend
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir.edit import attributes_of, constants_of
from ortflow.workflow.graph.objective.modes import train_mode
from ortflow.workflow.graph.types import SEED
from ortflow.workflow.onnx_runtime import onnxruntime as ort

BATCH, TIME, CONTEXT = 2, 12, 16
SCALE = 0.25
TRIANGLE = np.triu(np.full((CONTEXT, CONTEXT), -1e9, np.float32), 1)
WINDOW = np.where(np.tri(CONTEXT, k=-10) == 1, np.float32(-1e9), TRIANGLE)
"""Causal for the first ten tokens only."""
MASKED = "masked = Identity(scaled)"
AFTER = "after = Identity(mixed)"
CORNER = """
    length = Shape <start = 1, end = 2> (x)
    square = Concat <axis = 0> (length, length)
    mask = Slice (triangle, corner, square)
"""
RANGES = """
    length = Shape <start = 1, end = 2> (x)
    scalar = Squeeze (length)
    places = Range (zero_index, scalar, one_index)
    rows = Unsqueeze (places, one_axis)
"""


def model(mask: str = MASKED, after: str = AFTER, heads: int = 4, size: int = 8, groups: int = 1) -> onnx.ModelProto:
    """Attention of x to itself; `mask` makes `masked` of `scaled`, `after` makes `after` of `mixed`.

    Each head of keys and values serves `groups` heads of queries.
    """
    width, shared = heads * size, heads // groups
    repeated = "k = Identity (k_shared) v = Identity (v_shared)"
    if groups > 1:
        repeated = "".join(
            f"""
            {x}_5 = Unsqueeze ({x}_shared, two_axis)
            {x}_shape = Concat <axis = 0> (count, shared, groups, time, size)
            {x}_many = Expand ({x}_5, {x}_shape)
            {x}_flat = Concat <axis = 0> (count, heads, time, size)
            {x} = Reshape ({x}_many, {x}_flat)
            """
            for x in "kv"
        )
    text = f"""
    <ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
    attention (float[batch, time, {width}] x, float[{width}, {width}] wq, float[{width}, {shared * size}] wk,
               float[{width}, {shared * size}] wv, float[1, {heads}, 1, {TIME}] bias, bool[batch, 1, 1, time] keys,
               float[batch, 1, 1, time] added, float[batch, 1, time, 1] gate) => (float loss)
    {{
        count = Shape <start = 0, end = 1> (x)
        time = Shape <start = 1, end = 2> (x)
        xq = MatMul (x, wq)
        xk = MatMul (x, wk)
        xv = MatMul (x, wv)
        q_split = Reshape (xq, by_head)
        k_split = Reshape (xk, by_shared)
        v_split = Reshape (xv, by_shared)
        q = Transpose <perm = [0, 2, 1, 3]> (q_split)
        k_shared = Transpose <perm = [0, 2, 1, 3]> (k_split)
        v_shared = Transpose <perm = [0, 2, 1, 3]> (v_split)
        {repeated}
        k_turned = Transpose <perm = [0, 1, 3, 2]> (k)
        dot = MatMul (q, k_turned)
        scaled = Mul (dot, scale)
        {mask}
        weights = Softmax <axis = -1> (masked)
        {"" if "mixed = " in after else "mixed = MatMul (weights, v)"}
        {after}
        merged = Transpose <perm = [0, 2, 1, 3]> (after)
        flat = Reshape (merged, whole)
        squares = Mul (flat, flat)
        loss = ReduceSum <keepdims = 0> (squares)
    }}
    """
    made = parser.parse_model(text)
    constants: dict[str, np.ndarray] = {
        "scale": np.float32(SCALE),
        "by_head": np.array([0, 0, heads, size]),
        "by_shared": np.array([0, 0, shared, size]),
        "whole": np.array([0, 0, width]),
        "triangle": TRIANGLE,
        "window": WINDOW,
        "low": np.float32(-1e9),
        "nothing": np.float32(-np.inf),
        "mild": np.float32(-2),
        "zero": np.float32(0),
        "one": np.float32(1),
        "ratio": np.float32(0.5),
        "yes": np.array(True),
        "corner": np.array([0, 0]),
        "zero_index": np.array(0),
        "one_index": np.array(1),
        "one_axis": np.array([1]),
        "two_axis": np.array([2]),
        "shared": np.array([shared]),
        "groups": np.array([groups]),
        "heads": np.array([heads]),
        "size": np.array([size]),
    }
    read = {name for node in made.graph.node for name in node.input}
    made.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in read
    )
    kept = [value for value in made.graph.input if value.name in read]
    del made.graph.input[:]
    made.graph.input.extend(kept)
    return made


def feeds(of: onnx.ModelProto) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    sizes = {"batch": BATCH, "time": TIME}
    made = {}
    for value in of.graph.input:
        shape = [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        made[value.name] = random.standard_normal(shape, np.float32)
    if "keys" in made:
        made["keys"] = np.arange(TIME) < np.array([TIME, TIME - 4]).reshape(BATCH, 1, 1, 1)
    if "added" in made:
        made["added"][1, ..., -3:] = -np.inf
    return made


def run(of: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The loss and the gradients of the weights."""
    made, _ = differentiate(of, ["wq", "wk", "wv", "bias"], "loss")
    made = compose(compose_attention(made))
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(given)), strict=True))


CAUSAL, FULL = 1, 0
FOUND = {
    "plain": (model(), FULL, 0),
    "divided": (model("inverse = Div (one, scale) masked = Div (dot, inverse)"), FULL, 0),
    "grouped": (model(groups=2), FULL, 0),
    "shared-by-all": (model(groups=4), FULL, 0),
    "triangle": (model(f"{CORNER} masked = Add (scaled, mask)"), CAUSAL, 0),
    "triangle-first": (model(f"{CORNER} masked = Add (mask, scaled)"), CAUSAL, 0),
    "trilu": (
        model(f"{CORNER} ones = Equal (mask, mask) below = Trilu <upper = 0> (ones)"
              " masked = Where (below, scaled, low)"),
        CAUSAL, 0,
    ),
    "ranges": (model(f"{RANGES} later = Greater (places, rows) masked = Where (later, low, scaled)"), CAUSAL, 0),
    "window": (model(f"{CORNER.replace('triangle', 'window')} masked = Add (scaled, mask)"), FULL, 1),
    "keys": (model("masked = Where (keys, scaled, low)"), FULL, 1),
    "keys-added": (model("numbers = Where (keys, zero, low) masked = Add (scaled, numbers)"), FULL, 1),
    "hidden-keys": (model("hidden = Not (keys) masked = Where (hidden, low, scaled)"), FULL, 1),
    "keys-and-ranges": (
        model(f"{RANGES} before = LessOrEqual (places, rows) both = And (before, keys)"
              " masked = Where (both, scaled, low)"),
        CAUSAL, 1,
    ),
    "added": (model("masked = Add (scaled, added)"), FULL, 1),
    "added-and-keys": (model("sum = Add (scaled, added) masked = Where (keys, sum, low)"), FULL, 1),
    "mild-constant": (model("numbers = Where (keys, zero, mild) masked = Add (scaled, numbers)"), FULL, 1),
    "turned": (
        model("q_moved = Mul (q, q) k_moved = Tanh (k) moved_turned = Transpose <perm = [0, 1, 3, 2]> (k_moved)"
              " dot_2 = MatMul (q_moved, moved_turned) masked = Mul (dot_2, scale)"),
        FULL, 0,
    ),
    "groups-of-values": (
        model("k_moved = Tanh (k_turned) dot_2 = MatMul (q, k_moved) masked = Mul (dot_2, scale)", groups=2), FULL, 0,
    ),
    "gate": (model(after="after = Mul (mixed, gate)"), FULL, 0),
    "guard": (
        model(
            "masked = Where (keys, scaled, low)",
            "bad = IsNaN (weights) safe = Where (bad, zero, weights) mixed = MatMul (safe, v) after = Identity (mixed)",
        ),
        FULL, 1,
    ),
}  # fmt: skip
"""Name -> graph, whether it is causal, how many masks are fed."""


@pytest.mark.parametrize("name", FOUND)
def test_attention_is_found_and_the_same(name: str) -> None:
    forward, causal, masks = FOUND[name]
    fused, notes = attend(forward)
    assert not notes
    (node,) = [node for node in fused.graph.node if node.op_type == OPERATOR]
    assert (attributes_of(node)["causal"], len(node.input) - 3) == (causal, masks)
    assert attributes_of(node)["scale"] == pytest.approx(SCALE)
    left = [each.op_type for each in fused.graph.node]
    assert "Softmax" not in left
    # Computations between its Transpose and the product keep the Transpose, or the order of axes.
    assert left.count("Transpose") == {"gate": 1, "turned": 2, "groups-of-values": 4}.get(name, 0)
    heads_first = {"turned": [1, 1, 0], "groups-of-values": [0, 0, 1]}
    assert attributes_of(node)["heads_first"] == heads_first.get(name, [0, 0, 0])
    given = feeds(forward)
    expected, actual = run(forward, given), run(fused, given)
    assert expected.keys() == actual.keys() >= {"loss", "wq_grad", "wk_grad", "wv_grad"}
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=key)


def test_fully_masked_queries_give_zeros_where_the_nodes_do() -> None:
    guard = "bad = IsNaN (weights) safe = Where (bad, zero, weights) mixed = MatMul (safe, v) after = Identity (mixed)"
    forward = model("masked = Where (keys, scaled, nothing)", guard)
    fused, notes = attend(forward)
    assert not notes
    given = feeds(forward)
    given["keys"] = given["keys"] & np.array([True, False]).reshape(BATCH, 1, 1, 1)
    expected, actual = run(forward, given), run(fused, given)
    for key, value in expected.items():
        assert np.isfinite(value).all()
        np.testing.assert_allclose(actual[key], value, rtol=1e-5, atol=1e-5 * np.abs(value).max(), err_msg=key)


def test_the_gradient_is_one_node_and_described() -> None:
    fused, _ = attend(FOUND["keys"][0])
    made, _ = differentiate(fused, ["wq"], "loss")
    (node,) = [node for node in made.graph.node if node.op_type == GRADIENT]
    described = {value.name for value in made.graph.value_info} | {value.name for value in made.graph.output}
    assert described.issuperset(node.output)
    assert len(node.input) == 7


DROPPED = "mixed = MatMul (kept, v) after = Identity (mixed)"


def numbered(made: onnx.ModelProto) -> onnx.ModelProto:
    """With dropouts that are switched on for training."""
    train_mode(made.graph)
    return made


@pytest.mark.parametrize("masked", [False, True])
def test_a_dropout_of_weights_is_the_node_s(masked: bool) -> None:
    mask = "masked = Add (scaled, added)" if masked else MASKED
    forward = numbered(model(mask, after=f"kept = Dropout (weights, ratio, yes) {DROPPED}"))
    fused, notes = attend(forward, ["wq", "wk", "wv"])
    assert not notes
    assert [value.name for value in fused.graph.input][-1] == SEED
    assert not [node for node in fused.graph.node if node.op_type == "Dropout"]
    (node,) = [node for node in fused.graph.node if node.op_type == OPERATOR]
    assert attributes_of(node)["dropout"] == 0.5
    *_, added, seed, offset = node.input
    assert added == ("added" if masked else "")
    assert constants_of(fused.graph)[offset].tolist() == [0]
    (made,) = [each for each in fused.graph.node if seed in each.output]
    assert (made.op_type, made.input[0]) == ("Add", SEED)
    assert constants_of(fused.graph)[made.input[1]].tolist() != [0]
    train, _ = differentiate(fused, ["wq", "wk", "wv"], "loss")
    (gradient,) = [node for node in train.graph.node if node.op_type == GRADIENT]
    assert list(gradient.input[-3:]) == list(node.input[-3:])
    assert attributes_of(gradient)["dropout"] == 0.5


REFUSED = {
    "learned-bias": (model("masked = Add (scaled, bias)"), "has a gradient"),
    "dropout-of-onnx-runtime": (model(after=f"kept = Dropout (weights, ratio, yes) {DROPPED}"), "dropout that ONNX"),
    "mask-of-dropout": (
        numbered(model(after=f"kept, mask = Dropout (weights, ratio, yes) {DROPPED} unused = Not (mask)")), "is read"
    ),
    "two-dropouts": (
        numbered(model(after=f"once = Dropout (weights, ratio, yes) kept = Dropout (once, ratio, yes) {DROPPED}")),
        "several dropouts",
    ),
    "weights-changed": (model(after="half = Tanh (weights) mixed = MatMul (half, v) after = Identity (mixed)"),
                        "go through"),
    "scaled-behind-mask": (model("sum = Add (scaled, added) masked = Mul (sum, ratio)"), "after the mask"),
    "odd-head": (model(size=12), "size 12"),
    "large-head": (model(heads=2, size=136), "size 136"),
}  # fmt: skip


def test_one_token_is_left_unchanged() -> None:
    forward = model()
    forward.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1
    same, notes = attend(forward)
    assert len(notes) == 1
    assert "single token" in notes[0]
    assert not any(node.op_type == OPERATOR for node in same.graph.node)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_unchanged_has_a_reason(name: str) -> None:
    forward, reason = REFUSED[name]
    same, notes = attend(forward)
    assert len(notes) == 1
    assert reason in notes[0]
    assert not any(node.op_type == OPERATOR for node in same.graph.node)


def test_a_softmax_without_products_is_passed_over() -> None:
    text = """
    <ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
    head (float[batch, 8] x, float[8, 4] w) => (float[batch, 4] y) {
        scores = MatMul (x, w)
        y = Softmax <axis = -1> (scores)
    }
    """
    forward = parser.parse_model(text)
    same, notes = attend(forward)
    assert not notes
    assert same == forward
