"""Random operators draw numbers that depend on the seed: reproducible, distinct per place, rightly distributed."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import run_graph, value
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.normalize.randomness import RANDOM, seed_random_operators
from ortflow.workflow.graph.types import SEED

COUNT = 60_000
HALF = np.full((COUNT,), 0.3, np.float32)
LOGITS = np.log(np.array([[0.5, 0.25, 0.0, 0.25], [0.1, 0.2, 0.3, 0.4]], np.float32) + np.float32(1e-30))


def graph_of(nodes: list[onnx.NodeProto], *inputs: onnx.ValueInfoProto, outputs: list[str]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "random", inputs, [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs]
    )
    for each in graph.output:
        each.ClearField("type")
        each.type.tensor_type.elem_type = TensorProto.FLOAT
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def seeded(model: onnx.ModelProto) -> onnx.ModelProto:
    prepared = prepare(model)[0]
    assert seed_random_operators(prepared)
    onnx.checker.check_model(prepared, full_check=True)
    return prepared


def drawn(model: onnx.ModelProto, seed: int = 7, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    return run_graph(model, {**feeds, SEED: np.array([seed])})


def one(op_type: str, **attributes: Any) -> onnx.ModelProto:
    """A model of two such nodes, `a` and `b`."""
    inputs = [] if op_type in ("RandomNormal", "RandomUniform") else ["x"]
    if not inputs:
        attributes["shape"] = [COUNT]
    floats = op_type != "Multinomial"
    nodes = [helper.make_node(op_type, inputs, [n if floats else f"{n}i"], n, **attributes) for n in "ab"]
    if not floats:
        nodes += [helper.make_node("Cast", [f"{n}i"], [n], f"{n}/cast", to=TensorProto.FLOAT) for n in "ab"]
    shapes = {"Multinomial": LOGITS.shape}
    given = [value("x", list(shapes.get(op_type, [COUNT])))] if inputs else []
    return seeded(graph_of(nodes, *given, outputs=["a", "b"]))


CASES = {
    "Bernoulli": ({}, HALF, 0.3, 0.21, (0, 1)),
    "RandomNormal": ({"mean": 2.0, "scale": 3.0}, None, 2.0, 9.0, (-20, 24)),
    "RandomNormalLike": ({}, HALF, 0.0, 1.0, (-6, 6)),
    "RandomUniform": ({"low": -1.0, "high": 3.0}, None, 1.0, 16 / 12, (-1, 3)),
    "RandomUniformLike": ({}, HALF, 0.5, 1 / 12, (0, 1)),
}


def test_every_operator_is_checked() -> None:
    assert {*CASES, "Multinomial"} == set(RANDOM)


@pytest.mark.parametrize("op_type", CASES)
def test_draws(op_type: str) -> None:
    attributes, x, mean, variance, (low, high) = CASES[op_type]
    model = one(op_type, **attributes)
    feeds = {} if x is None else {"x": x}
    first, again, other = drawn(model, **feeds), drawn(model, **feeds), drawn(model, seed=8, **feeds)
    for name in "ab":
        values = first[name].astype(np.float64)
        np.testing.assert_array_equal(values, again[name])
        assert values.mean() == pytest.approx(mean, abs=6 * np.sqrt(variance / COUNT))
        assert values.var() == pytest.approx(variance, rel=0.05)
        assert low <= values.min()
        assert values.max() <= high
        # Neither from one place to the next, nor from seed to seed.
        for pair in ((values[1:], values[:-1]), (values, other[name])):
            assert abs(np.corrcoef(*pair)[0, 1]) < 6 / np.sqrt(COUNT)
    assert abs(np.corrcoef(first["a"], first["b"])[0, 1]) < 6 / np.sqrt(COUNT)


def test_multinomial_draws_classes_by_their_weight() -> None:
    model = one("Multinomial", sample_size=COUNT)
    found = drawn(model, x=LOGITS)
    assert found["a"].shape == (2, COUNT)
    for row, weights in zip(found["a"], np.exp(LOGITS), strict=True):
        shares = np.bincount(row.astype(int), minlength=4) / COUNT
        np.testing.assert_allclose(shares, weights, atol=0.01)
    assert 2 not in found["a"][0]
    np.testing.assert_array_equal(found["a"], drawn(model, x=LOGITS)["a"])
    assert (found["a"] != found["b"]).mean() > 0.5


def test_the_hash_is_splitmix64() -> None:
    """Against a reference in Python's integers."""

    def mixed(z: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z = ((z ^ (z >> shift)) * factor) % 2**64
        return z ^ (z >> 31)

    def uniform(seed: int, name: str, place: int) -> float:
        key = int.from_bytes(hashlib.blake2b(f"{name}/0".encode(), digest_size=8).digest(), "little")
        return (mixed((mixed((seed + key) % 2**64) + place * 0x9E3779B97F4A7C15) % 2**64) >> 40) / 2**24

    found = drawn(one("RandomUniform"), seed=2**31 - 1)["b"]
    np.testing.assert_array_equal(found[:50], np.float32([uniform(2**31 - 1, "b", i) for i in range(50)]))


def test_a_seed_of_the_file_names_the_numbers() -> None:
    """Nodes with the same seed draw the same numbers, with other seeds others; numbers still differ between steps."""
    nodes = [
        helper.make_node("RandomUniformLike", ["x"], [name], name, seed=seed)
        for name, seed in (("a", 1.0), ("b", 1.0), ("c", 2.0))
    ]
    model = seeded(graph_of(nodes, value("x", [COUNT]), outputs=["a", "b", "c"]))
    found, next_step = drawn(model, x=HALF), drawn(model, seed=8, x=HALF)
    np.testing.assert_array_equal(found["a"], found["b"])
    assert (found["a"] != found["c"]).mean() > 0.99
    assert (found["a"] != next_step["a"]).mean() > 0.99


def loop(*body: onnx.NodeProto) -> onnx.NodeProto:
    """Three iterations over `body`, which computes `drawn`."""
    graph = helper.make_graph(
        [*body, helper.make_node("Identity", ["going"], ["go"])],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("go", TensorProto.BOOL, []), value("drawn", [5])],
    )
    return helper.make_node("Loop", ["three", ""], ["y"], "loop", body=graph)


def with_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.initializer.append(numpy_helper.from_array(np.array(3), "three"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    return model


def test_each_iteration_of_a_loop_draws_new_numbers() -> None:
    node = helper.make_node("RandomNormalLike", ["x"], ["drawn"])
    model = seeded(with_constants(graph_of([loop(node)], value("x", [5]), outputs=["y"])))
    found = drawn(model, x=HALF[:5])["y"]
    assert found.shape == (3, 5)
    assert len(np.unique(found)) == 15
    np.testing.assert_array_equal(found, drawn(model, x=HALF[:5])["y"])


def test_within_a_branch_and_a_function() -> None:
    branch = helper.make_graph([helper.make_node("Noise", ["x"], ["n"], domain="own")], "then", [], [value("n", [5])])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["m"])], "else", [], [value("m", [5])])
    node = helper.make_node("If", ["yes"], ["y"], "if", then_branch=branch, else_branch=other)
    model = with_constants(graph_of([node], value("x", [5]), outputs=["y"]))
    opsets = [helper.make_opsetid("", 18)]
    noise = helper.make_node("RandomUniformLike", ["a"], ["b"])
    model.functions.append(helper.make_function("own", "Noise", ["a"], ["b"], [noise], opsets))
    model.opset_import.append(helper.make_opsetid("own", 1))
    ready = seeded(model)
    found = drawn(ready, x=HALF[:5])["y"]
    assert len(np.unique(found)) == 5
    np.testing.assert_array_equal(found, drawn(ready, x=HALF[:5])["y"])


def test_a_scan_that_draws_is_refused() -> None:
    body = helper.make_graph(
        [helper.make_node("RandomNormalLike", ["row"], ["out"])], "body", [value("row", [5])], [value("out", [5])]
    )
    node = helper.make_node("Scan", ["x"], ["y"], "scan", body=body, num_scan_inputs=1)
    model = prepare(graph_of([node], value("x", [3, 5]), outputs=["y"]))[0]
    with pytest.raises(UserError, match=r"node 'scan' \(Scan\) draws random numbers"):
        seed_random_operators(model)


def test_a_model_that_draws_nothing_is_unchanged() -> None:
    model = prepare(graph_of([helper.make_node("Relu", ["x"], ["y"])], value("x", [5]), outputs=["y"]))[0]
    before = model.SerializeToString()
    assert not seed_random_operators(model)
    assert model.SerializeToString() == before
