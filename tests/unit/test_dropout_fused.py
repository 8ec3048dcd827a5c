"""Dropouts in groups of elementwise nodes: kernels that a C++ compiler builds from the CUDA source, against numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from kernels import compute, needs_kernels
from onnx import TensorProto, helper, numpy_helper
from operators_on_cpu import needs_compilers, operators_here, session_of
from philox import Array, dropped

from ortflow.workflow.fusion.groups import fuse
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.types import SEED
from ortflow.workflow.kernels.dropout import attributes

RATIO = 0.3
FLAGS = attributes(RATIO)
SEEDS = 7, 2**40 + 3
NUMBER = 5


def dropout(x: str, y: str, number: str = "number") -> onnx.NodeProto:
    return helper.make_node("Dropout", [SEED, number, x], [y], domain=CUDA_DOMAIN, **FLAGS)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    known: Mapping[str, Sequence[int | str]],
    halves: Sequence[str] = (),
) -> onnx.ModelProto:
    """`known` are the shapes of what dropouts make, which onnx cannot infer."""
    kinds = dict.fromkeys(halves, TensorProto.FLOAT16)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "graph",
        [info(SEED, TensorProto.INT64, [1]), *(info(n, kinds.get(n, TensorProto.FLOAT), d) for n, d in inputs.items())],
        [info(name, kinds.get(name, TensorProto.FLOAT), known.get(name)) for name in outputs],
        [numpy_helper.from_array(np.array([n], np.int64), name) for name, n in (("number", NUMBER), ("other", 6))],
        value_info=[info(name, TensorProto.FLOAT, dims) for name, dims in known.items() if name not in outputs],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    shapes.infer(model, list(model.graph.value_info))
    return model


def run(
    model: onnx.ModelProto, feeds: Mapping[str, Any], folder: pytest.TempPathFactory, patch: pytest.MonkeyPatch
) -> list[Array]:
    operators = operators_here(folder.getbasetemp(), patch)
    return list(session_of(operators, model.SerializeToString()).run(None, dict(feeds)))


def expected(x: Array, seed: int, number: int = NUMBER) -> Array:
    return dropped(x, seed, number, int(FLAGS["dropped"]), float(FLAGS["scale"]))


BRANCH = [
    helper.make_node("Add", ["x", "bias"], ["h"]),
    dropout("h", "d"),
    helper.make_node("Add", ["d", "residual"], ["y"]),
]
"""A product's bias, a dropout, and the sum with what passes by."""


@needs_compilers
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [(6, 5, 32), (1, 1, 32), (3, 7, 33), (2, 3, 2), (0, 5, 8), (300, 1024)], ids=str)
def test_bias_dropout_and_residual_are_one_kernel(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], seed: int
) -> None:
    named = ["n", *shape[1:]] if 0 in shape else shape
    model = model_of(BRANCH, {"x": named, "bias": shape[-1:], "residual": named}, ["y"], {"d": named})
    fused, taken = fuse(model)
    assert ([node.op_type for node in fused.graph.node], taken) == (["Fused"], 3)
    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=dims).astype(np.float32) for name, dims in
             {"x": shape, "bias": shape[-1:], "residual": shape}.items()}  # fmt: skip
    (y,) = run(fused, {**feeds, SEED: np.array([seed])}, tmp_path_factory, monkeypatch)
    np.testing.assert_array_equal(y, expected(feeds["x"] + feeds["bias"], seed) + feeds["residual"])


@needs_compilers
@pytest.mark.parametrize("shape", [(6, 5, 32), (3, 7, 33), (16,)], ids=str)
def test_halves_are_dropped_in_fp32(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        dropout("wide", "d"),
        helper.make_node("Cast", ["d"], ["y"], to=TensorProto.FLOAT16),
    ]
    fused, taken = fuse(model_of(nodes, {"x": shape}, ["y"], {"d": shape}, ["x", "y"]))
    assert ([node.op_type for node in fused.graph.node], taken) == (["Fused"], 3)
    assert attributes_of(fused.graph.node[0])["lanes"] == 8
    x = np.random.default_rng(0).normal(size=shape).astype(np.float16)
    (y,) = run(fused, {"x": x, SEED: np.array([3])}, tmp_path_factory, monkeypatch)
    np.testing.assert_array_equal(y, expected(x.astype(np.float32), 3).astype(np.float16))


@needs_compilers
@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("shape", [(6, 5, 32), (), (1,), (7,)], ids=str)
def test_one_alone_is_a_kernel_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], described: bool
) -> None:
    model = model_of([dropout("x", "y")], {"x": shape}, ["y"], {"y": shape} if described else {})
    fused, taken = fuse(model)
    assert ([node.op_type for node in fused.graph.node], taken) == (["Fused"], 1)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    (y,) = run(fused, {"x": x, SEED: np.array([11])}, tmp_path_factory, monkeypatch)
    np.testing.assert_array_equal(y, expected(x, 11))


@needs_compilers
@pytest.mark.parametrize("sizes", [(4, 4), (1, 4), (4, 1), (1, 1)], ids=str)
def test_sizes_that_were_likened_may_differ_in_a_run(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int]
) -> None:
    """The dropout then has fewer elements than the group, and drops the same ones in every row."""
    nodes = [dropout("x", "d"), helper.make_node("Add", ["d", "residual"], ["y"])]
    model = model_of(nodes, {"x": ["n", 3, 8], "residual": ["m", 3, 8]}, ["y"], {"d": ["n", 3, 8], "y": ["k", 3, 8]})
    fused, taken = fuse(model)
    assert ([node.op_type for node in fused.graph.node], taken) == (["Fused"], 2)
    random = np.random.default_rng(0)
    x, residual = (random.normal(size=(size, 3, 8)).astype(np.float32) for size in sizes)
    (y,) = run(fused, {"x": x, "residual": residual, SEED: np.array([9])}, tmp_path_factory, monkeypatch)
    np.testing.assert_array_equal(y, expected(x, 9) + residual)


def test_one_whose_place_no_operand_has_is_left_apart() -> None:
    """Its input is computed by the group, and its result is not read elsewhere."""
    nodes = [
        helper.make_node("Add", ["x", "z"], ["h"]),
        dropout("h", "d"),
        helper.make_node("Add", ["d", "residual"], ["y"]),
    ]
    dims = {"h": ["a", 8], "d": ["a", 8], "y": ["k", 8]}
    model = model_of(nodes, {"x": ["n", 8], "z": ["m", 8], "residual": ["l", 8]}, ["y"], dims)
    fused, _ = fuse(model)
    (found,) = [node for node in fused.graph.node if SEED in node.input]
    assert list(found.output) == ["d"]


@needs_compilers
@pytest.mark.parametrize("rows", [(7, 3), (40, 30), (0,)], ids=str)
@pytest.mark.parametrize("width", [32, 33, 520])
def test_what_is_dropped_is_also_summed_over_rows(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], width: int
) -> None:
    """As in the backward pass: the gradient of a bias before a dropout. The sums are of as many rows as warps have."""
    shape = (*rows, width)
    nodes = [
        helper.make_node("Add", ["x", "residual"], ["h"]),
        dropout("h", "y"),
        helper.make_node("ColumnSums", ["y"], ["sums"], domain=CUDA_DOMAIN),
    ]
    named = ["n", *shape[1:]] if rows == (0,) else shape
    model = model_of(nodes, {"x": named, "residual": named}, ["y", "sums"], {"y": named})
    fused, _ = fuse(model)
    assert [node.op_type for node in fused.graph.node] == ["FusedSums", "ColumnSums"]
    parts = fused.graph.node[0].output[-1]
    # The last sum is a kernel that only a GPU runs.
    del fused.graph.node[1:]
    fused.graph.output[1].name = parts
    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=shape).astype(np.float32) for name in ("x", "residual")}
    y, sums = run(fused, {**feeds, SEED: np.array([1])}, tmp_path_factory, monkeypatch)
    mine = expected(feeds["x"] + feeds["residual"], 1)
    np.testing.assert_array_equal(y, mine)
    np.testing.assert_allclose(sums.sum(0), mine.reshape(-1, width).sum(0), rtol=1e-4, atol=1e-4)


def test_dropouts_of_one_ratio_have_one_source() -> None:
    """Otherwise each layer's kernels would be compiled."""
    sources = []
    for number in ("number", "other"):
        model = model_of([dropout("x", "y", number)], {"x": [4, 8]}, ["y"], {})
        sources.append(attributes_of(fuse(model)[0].graph.node[0])["source"])
    assert sources[0] == sources[1]


@needs_compilers
@needs_kernels
def test_cpus_and_gpus_have_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(0).normal(size=(9, 13, 64)).astype(np.float32)
    fused, _ = fuse(model_of([dropout("x", "y")], {"x": x.shape}, ["y"], {}))
    (y,) = run(fused, {"x": x, SEED: np.array([21])}, tmp_path_factory, monkeypatch)
    (other,) = compute("Dropout", np.array([21]), np.array([NUMBER]), x, **FLAGS)
    np.testing.assert_array_equal(y, other)
