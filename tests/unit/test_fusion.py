"""Groups of elementwise nodes: which are formed, that they compute the same, and the CUDA source for them."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflow.workflow.cuda import FUSED
from ortflow.workflow.cuda import library as library_of_operators
from ortflow.workflow.cuda.library import operator_library
from ortflow.workflow.fusion.groups import INPUTS, fuse
from ortflow.workflow.fusion.literals import literal
from ortflow.workflow.fusion.source import CONVERSIONS, kernel
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import attributes_of

Array = np.ndarray


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    constants: Mapping[str, Any] | None = None,
    halves: Sequence[str] = (),
) -> onnx.ModelProto:
    kinds = dict.fromkeys(halves, TensorProto.FLOAT16)
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), dims)
            for name, dims in inputs.items()
        ],
        [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    shapes.infer(model, [])
    return model


def node(operator: str, *names: str, **attributes: Any) -> onnx.NodeProto:
    """`names` end with the output."""
    return helper.make_node(operator, names[:-1], names[-1:], **attributes)


def operators(model: onnx.ModelProto) -> list[str]:
    return [one.op_type for one in model.graph.node]


GELU = [
    node("Add", "x", "bias", "h"),
    node("Mul", "h", "root", "s"),
    node("Erf", "s", "e"),
    node("Add", "e", "one", "p"),
    node("Mul", "h", "p", "hp"),
    node("Mul", "hp", "half", "y"),
]
HALVES = {"root": 0.5**0.5, "one": 1.0, "half": 0.5}


def run(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """Runs fused nodes with kernels that a C++ compiler builds from the CUDA source."""
    return [np.asarray(value) for value in ReferenceEvaluator(model, new_ops=[Fused]).run(None, dict(feeds))]


class Fused(OpRun):
    op_domain = CUDA_DOMAIN
    folder: Path

    def _run(self, *values: Array, source: str, lanes: int, **bits: int) -> tuple[Array, ...]:
        whole = np.broadcast_shapes(*(value.shape for value in values))
        count = sum(f"Operand o{place}" in source for place in range(6))
        results = []
        for place in range(count):
            read = [value for number, value in enumerate(values) if bits[f"inputs_of_{place}"] >> number & 1]
            kind = np.float16 if f"store<half_t, N, FLAT>(y{place}" in source else np.float32
            results.append(np.full(np.broadcast_shapes(*(value.shape for value in read)), np.nan, kind))
        operands = [operand(value, whole) for value in (*values, *results)]
        program = HOST + source.replace(CONVERSIONS, "")
        for name in ("fused", "fused_wide"):
            arguments = ", ".join(f"a[{place}]" for place in range(len(operands)))
            program += (
                f'extern "C" void start_{name}(const Operand *a, unsigned long long n) {{ {name}({arguments}, n); }}\n'
            )
        library = compiled(program, self.folder)
        given, count = (Operand * len(operands))(*operands), ctypes.c_ulonglong(int(np.prod(whole)))
        library.start_fused(given, count)
        if whole and whole[-1] % lanes == 0:
            narrow = [result.copy() for result in results]
            for result in results:
                result[...] = np.nan
            library.start_fused_wide(given, count)
            for one, other in zip(narrow, results, strict=True):
                np.testing.assert_array_equal(one, other)
        return tuple(results)


class Operand(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("mode", ctypes.c_uint), ("step", ctypes.c_uint), ("count", ctypes.c_uint),
        ("rank", ctypes.c_uint), ("dims", ctypes.c_uint * 8), ("strides", ctypes.c_longlong * 8),
    )  # fmt: skip


def operand(value: Array, whole: tuple[int, ...]) -> Operand:
    """Always by strides: the special cases are in operators.c, which the GPU tests cover."""
    dims = (1,) * (len(whole) - value.ndim) + value.shape
    strides, stride = [0] * len(whole), 1
    for axis in reversed(range(len(whole))):
        strides[axis] = stride if dims[axis] != 1 else 0
        stride *= dims[axis]
    return Operand(
        value.ctypes.data, 3, 1, 1, len(whole), (ctypes.c_uint * 8)(*whole), (ctypes.c_longlong * 8)(*strides)
    )


HOST = """
#include <cmath>
#include <cstring>
#define __device__
#define __grid_constant__
#define __global__
#define __forceinline__ inline
static struct { unsigned x; } blockIdx, threadIdx, blockDim = {1}, gridDim = {1};
static float __int_as_float(unsigned bits) { float value; memcpy(&value, &bits, 4); return value; }
static int __float_as_int(float value) { int bits; memcpy(&bits, &value, 4); return bits; }
static float from_fp16(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static unsigned short to_fp16(float x) { _Float16 y = x; unsigned short z; memcpy(&z, &y, 2); return z; }
static unsigned short to_bf16(float x) {
    unsigned bits = __float_as_int(x);
    return x != x ? 0x7fff : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static float quick_exp(float x) { return expf(x); }
static float quick_inverse(float x) { return 1 / x; }
"""
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def compiled(program: str, folder: Path) -> ctypes.CDLL:
    place = folder / f"kernel-{abs(hash(program))}"
    place.with_suffix(".cpp").write_text(program)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-ffp-contract=off", "-o", place.with_suffix(".so"), place.with_suffix(".cpp")],
        check=True,
    )
    return ctypes.CDLL(str(place.with_suffix(".so")))


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 5, 8), (1, 1, 8), (0, 5, 8)])
def test_a_chain_is_one_kernel_and_computes_the_same(tmp_path: Path, shape: tuple[int, ...]) -> None:
    Fused.folder = tmp_path
    model = model_of(GELU, {"x": ["n", "s", 8], "bias": [8]}, ["h", "y"], HALVES)
    fused, taken = fuse(model)
    assert operators(fused) == ["Fused"]
    assert taken == 6
    random = np.random.default_rng(0)
    feeds = {"x": random.normal(size=shape).astype(np.float32), "bias": random.normal(size=8).astype(np.float32)}
    for mine, theirs in zip(run(fused, feeds), run(model, feeds), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@needs_compiler
@pytest.mark.parametrize("shape", [(3, 5, 16), (5, 3)])
def test_halves_are_read_and_written_and_computed_in_fp32(tmp_path: Path, shape: tuple[int, ...]) -> None:
    Fused.folder = tmp_path
    nodes = [
        node("Cast", "x", "wide", to=TensorProto.FLOAT),
        node("Add", "wide", "bias", "h"),
        node("Cast", "h", "rounded", to=TensorProto.FLOAT16),
        node("Cast", "rounded", "again", to=TensorProto.FLOAT),
        node("Mul", "again", "third", "t"),
        node("Cast", "t", "y", to=TensorProto.FLOAT16),
    ]
    model = model_of(nodes, {"x": shape, "bias": shape[-1:]}, ["y", "t"], {"third": 1 / 3}, ["x", "y"])
    fused, taken = fuse(model)
    assert (operators(fused), taken) == (["Fused", "Fused"], 6)
    assert next(one.output[0] for one in fused.graph.node) == "rounded", (
        "a value that is read as half is stored as half"
    )
    random = np.random.default_rng(0)
    feeds = {
        "x": random.normal(0, 100, shape).astype(np.float16),
        "bias": random.normal(size=shape[-1]).astype(np.float32),
    }
    for mine, theirs in zip(run(fused, feeds), run(model, feeds), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)


@needs_compiler
@pytest.mark.parametrize(
    ("operator", "exact"),
    [
        ("Erf", np.vectorize(math.erf, otypes=[float])), ("Exp", np.exp), ("Tanh", np.tanh),
        ("Sigmoid", lambda x: 1 / (1 + np.exp(-x))),
    ],
    ids=["erf", "exp", "tanh", "sigmoid"],
)  # fmt: skip
def test_what_is_stored_as_halves_is_right_to_their_rounding(tmp_path: Path, operator: str, exact: Any) -> None:
    Fused.folder = tmp_path
    nodes = [node("Identity", "x", "same"), node(operator, "same", "r"), node("Cast", "r", "y", to=TensorProto.FLOAT16)]
    fused, taken = fuse(model_of(nodes, {"x": ["n"]}, ["y"], halves=["y"]))
    assert taken == len(nodes)
    assert "quick_" in attributes_of(fused.graph.node[0])["source"].decode().split("group(")[1]
    random = np.random.default_rng(0)
    x = np.concatenate([random.normal(0, scale, 5000) for scale in (1e-4, 1e-2, 0.3, 1, 3)]).astype(np.float32)
    x = np.concatenate([x, np.float32([0, -0.0, 0.25, 0.5, -0.5, 20, -20, 100, -100])]).clip(-100, 11)
    (y,) = run(fused, {"x": x})
    expected = exact(x.astype(np.float64))
    # Half a unit in the last place, or of the smallest half, and a little.
    np.testing.assert_array_less(np.abs(y - expected), np.maximum(2.0**-11 * np.abs(expected), 2.0**-25) * 1.01)
    (wrong,) = run(fused, {"x": np.array([np.nan, np.inf, -np.inf], np.float32)})
    np.testing.assert_array_equal(wrong, exact(np.array([np.nan, np.inf, -np.inf])).astype(np.float16))


GELU_GRADIENT = [
    node("Identity", "x", "h"),
    node("Mul", "h", "root", "s"),
    node("Erf", "s", "e"),
    node("Mul", "e", "c", "ec"),
    node("Add", "ec", "half", "phi"),
    node("Mul", "h", "h", "square"),
    node("Mul", "square", "minus", "power"),
    node("Exp", "power", "density"),
    node("Mul", "density", "pi", "scaled"),
    node("Mul", "scaled", "h", "slope"),
    node("Add", "slope", "phi", "derivative"),
    node("Mul", "derivative", "dy", "dx"),
    node("Mul", "h", "phi", "gelu"),
    node("Cast", "dx", "dx.half", to=TensorProto.FLOAT16),
    node("Cast", "gelu", "gelu.half", to=TensorProto.FLOAT16),
]
"""Gelu of x by erf, and its derivative times dy; results as halves."""


def fused_gelu(*more: onnx.NodeProto, c: float = 0.5, minus: float = -0.5) -> tuple[onnx.ModelProto, str]:
    """That as one kernel, and its source behind the common part."""
    constants = {"root": 0.5**0.5, "c": c, "half": 0.5, "minus": minus, "pi": 1 / (2 * np.pi) ** 0.5}
    names = ["gelu.half", "dx.half", *(one.output[0] for one in more)]
    nodes = [*GELU_GRADIENT, *more]
    fused, _ = fuse(model_of(nodes, {"x": ["n"], "dy": ["n"]}, names, constants, halves=names))
    assert operators(fused) == ["Fused"]
    return fused, attributes_of(fused.graph.node[0])["source"].decode().split("void group(")[1]


@needs_compiler
def test_gelu_takes_one_power_for_value_and_derivative(tmp_path: Path) -> None:
    Fused.folder = tmp_path
    fused, text = fused_gelu()
    assert text.count("quick_exp(") == 1
    assert text.count("far_erf(") == 1
    assert "quick_erf(" not in text, "no digits near 0 are needed for what is added to 1/2"
    x = np.concatenate([np.linspace(-9, 9, 40_001), [0.0, -0.0, 60, -60, 1e-3, -1e-3]]).astype(np.float32)
    dy = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
    gelu, dx = run(fused, {"x": x, "dy": dy})
    exact = x.astype(np.float64)
    phi = np.array([math.erfc(-each * 0.5**0.5) / 2 for each in exact])
    slope = phi + exact * np.exp(-exact * exact / 2) / (2 * np.pi) ** 0.5
    for found, expected, scale in ((gelu, exact * phi, exact), (dx, slope * dy, dy)):
        bound = 2.0**-11 * np.abs(expected) + 3e-7 * np.abs(scale) + 2.0**-25
        np.testing.assert_array_less(np.abs(found - expected), 1.01 * bound)


@pytest.mark.parametrize(
    ("changes", "exps", "erf"),
    [({"minus": -0.4}, 2, "far_erf("), ({"minus": 0.5}, 2, "far_erf("), ({"c": 0.6}, 1, "quick_erf("),
     ({"c": -0.5}, 1, "far_erf(")],
    ids=str,
)  # fmt: skip
def test_what_is_no_gelu_keeps_its_powers_and_digits(changes: dict[str, float], exps: int, erf: str) -> None:
    _, text = fused_gelu(**changes)
    assert text.count("quick_exp(") == exps
    assert erf in text


def test_an_erf_that_is_read_elsewhere_keeps_its_digits() -> None:
    _, text = fused_gelu(node("Cast", "e", "erf.half", to=TensorProto.FLOAT16))
    assert "quick_erf(" in text


@needs_compiler
def test_conditions_stay_inside(tmp_path: Path) -> None:
    Fused.folder = tmp_path
    nodes = [
        node("Greater", "x", "zero", "g"),
        node("Less", "x", "six", "l"),
        node("And", "g", "l", "b"),
        node("Cast", "b", "mask", to=TensorProto.FLOAT),
        node("Mul", "dy", "mask", "m"),
        node("Where", "b", "m", "x", "dx"),
    ]
    model = model_of(nodes, {"x": ["n", 7], "dy": ["n", 7]}, ["dx"], {"zero": 0.0, "six": 6.0})
    fused, _ = fuse(model)
    assert operators(fused) == ["Fused"]
    random = np.random.default_rng(0)
    feeds = {name: random.normal(0, 5, (9, 7)).astype(np.float32) for name in ("x", "dy")}
    np.testing.assert_array_equal(run(fused, feeds)[0], run(model, feeds)[0])


def test_a_condition_that_is_read_elsewhere_keeps_its_nodes() -> None:
    nodes = [
        node("Greater", "x", "zero", "g"),
        node("Cast", "g", "mask", to=TensorProto.FLOAT),
        node("Mul", "x", "mask", "y"),
        node("Cast", "g", "count", to=TensorProto.INT64),
        node("Cast", "count", "z", to=TensorProto.FLOAT),
    ]
    fused, taken = fuse(model_of(nodes, {"x": ["n", 7]}, ["y", "z"], {"zero": 0.0}))
    assert taken == 0
    assert operators(fused) == operators(model_of(nodes, {"x": ["n", 7]}, ["y", "z"], {"zero": 0.0}))


@needs_compiler
def test_sizes_that_are_one_only_in_a_run_are_right(tmp_path: Path) -> None:
    """`n` and `m` are assumed to be equal; where one is 1, its value is broadcast and has its own shape."""
    Fused.folder = tmp_path
    nodes = [node("Exp", "a", "e"), node("Mul", "e", "two", "t"), node("Add", "t", "b", "y")]
    model = model_of(nodes, {"a": ["n", 4], "b": ["m", 4]}, ["t", "y"], {"two": 2.0})
    fused, _ = fuse(model)
    assert operators(fused) == ["Fused"]
    random = np.random.default_rng(0)
    for n, m in ((3, 3), (1, 3), (3, 1)):
        feeds = {"a": random.normal(size=(n, 4)).astype(np.float32), "b": random.normal(size=(m, 4)).astype(np.float32)}
        for mine, theirs in zip(run(fused, feeds), run(model, feeds), strict=True):
            assert mine.shape == theirs.shape
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_way_through_another_node_keeps_two_apart() -> None:
    nodes = [
        node("Exp", "x", "e"),
        node("Mul", "e", "e", "s"),
        node("ReduceSum", "s", "total"),
        node("Div", "s", "total", "q"),
        node("Sub", "q", "e", "y"),
    ]
    fused, _ = fuse(model_of(nodes, {"x": ["n", 7]}, ["y"]))
    assert operators(fused) == ["Fused", "ReduceSum", "Fused"]


def test_a_group_that_encloses_another_through_its_members_is_none() -> None:
    """The groups {a, c} and {b, d} would wait for each other."""
    nodes = [
        node("Exp", "x", "a"),
        node("Exp", "w", "b"),
        node("MatMul", "a", "square", "ma"),
        node("MatMul", "b", "square", "mb"),
        node("Add", "b", "ma", "d"),
        node("Add", "a", "mb", "c"),
    ]
    fused, _ = fuse(model_of(nodes, {"x": [4, 4], "w": [4, 4], "square": [4, 4]}, ["c", "d"]))
    onnx.checker.check_model(fused)
    made: set[str] = {value.name for value in fused.graph.input}
    for one in fused.graph.node:
        assert {*one.input} <= made, "in executable order"
        made.update(one.output)


def test_a_group_has_no_more_values_than_the_operator_holds() -> None:
    names = [f"x{number}" for number in range(40)]
    nodes = [node("Add", "x0", "x1", "s1")]
    nodes += [node("Add", f"s{number}", f"x{number + 1}", f"s{number + 1}") for number in range(1, 39)]
    fused, _ = fuse(model_of(nodes, {name: ["n"] for name in names}, ["s39"]))
    assert {*operators(fused)} == {"Fused"}
    assert max(len(one.input) for one in fused.graph.node) <= INPUTS


def test_a_constant_of_many_axes_and_integers_stay_out() -> None:
    nodes = [node("Mul", "x", "deep", "a"), node("Add", "a", "one", "y")]
    fused, taken = fuse(model_of(nodes, {"x": [3]}, ["y"], {"deep": [[[2.0]]], "one": 1.0}))
    assert (taken, operators(fused)) == (0, ["Mul", "Add"])


def test_equal_groups_have_one_source() -> None:
    twice = [
        helper.make_node(n.op_type, [f"{i}2" if i in "xhsephpy" else i for i in n.input], [f"{n.output[0]}2"])
        for n in GELU
    ]
    fused, _ = fuse(model_of([*GELU, *twice], {"x": [8], "bias": [8], "x2": [8]}, ["y", "y2"], HALVES))
    assert operators(fused) == ["Fused", "Fused"]
    assert len({attributes_of(one)["source"] for one in fused.graph.node}) == 1


def test_numbers_are_written_to_the_bit() -> None:
    assert literal(1.0) == "__int_as_float(0x3f800000)"
    assert literal(0.1) == "__int_as_float(0x3dcccccd)"
    text = kernel([node("Mul", "x", "c", "y")], ["x"], ["y"], {"c": float("inf")})
    assert "float v0 = x0[k] * __int_as_float(0x7f800000);" in text


def test_the_operator_compiles_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Not the user's cache, which may contain it already.
    monkeypatch.setattr(library_of_operators, "cache_folders", lambda purpose: [tmp_path])
    operator_library.cache_clear()
    try:
        path, reason = operator_library()
    finally:
        operator_library.cache_clear()
    if path is None:
        assert "no C compiler" in reason
        return
    library = ctypes.CDLL(str(path))
    assert library.RegisterCustomOps
    assert library.ortflow_cuda_function(None, None, None, None, None, 1) == 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_walk_is_quick_on_a_deep_graph() -> None:
    nodes = []
    for number in range(2000):
        nodes += [node("MatMul", f"x{number}", "w", f"m{number}"), node("Add", f"m{number}", "b", f"a{number}")]
        nodes += [node("Exp", f"a{number}", f"x{number + 1}")]
    fused, taken = fuse(model_of(nodes, {"x0": [4, 4], "w": [4, 4], "b": [4]}, ["x2000"]))
    assert taken == 4000
    assert FUSED in operators(fused)
