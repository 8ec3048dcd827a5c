"""The lowered form of a model computes the same as the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from messages import alike, says
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.onnx_runtime import onnxruntime as ort

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 4, 6, 6)).astype(np.float32)


def model(
    nodes: list[onnx.NodeProto],
    initializers: dict[str, np.ndarray] | None = None,
    *,
    opset: int = 18,
    ir_version: int = 10,
    shape: tuple[int | str, ...] = X.shape,
    kind: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A graph from x to y."""
    graph = helper.make_graph(
        nodes,
        "test",
        [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        initializer=[numpy_helper.from_array(a, n) for n, a in (initializers or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)


def run(graph: onnx.ModelProto, x: np.ndarray, threads: int = 1) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(["y"], {"x": x})[0]


def node(op: str, *inputs: str, output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, [output], f"{op.lower()}-{output}", **attributes)


def is_in_form(graph: onnx.ModelProto) -> bool:
    versions = {o.domain: o.version for o in graph.opset_import}
    return versions == {"": 18, "com.microsoft": 1} and graph.ir_version == 10 and not graph.functions


def small_network(opset: int) -> onnx.ModelProto:
    """Operators whose form changed between opsets 13 and 21."""
    axes: dict[str, Any] = {"axes": [2, 3]} if opset < 18 else {}
    split: dict[str, Any] = {} if opset < 18 else {"num_outputs": 2}
    return model(
        [
            node("Conv", "x", "w", "b", output="a", pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["a", "one", "b", "b", "one"], ["n"], "norm"),
            node("Relu", "n", output="r"),
            helper.make_node("Split", ["r"], ["s", "t"], "split", axis=1, **split),
            node("Add", "s", "t", output="u"),
            node("AveragePool", "u", output="p", kernel_shape=[2, 2]),
            node("ReduceMax", "p", *([] if opset < 18 else ["axes"]), output="m", keepdims=0, **axes),
            node("ReduceL2", "m", output="l", keepdims=1, **({"axes": [-1]} if opset < 18 else {})),
            node("Reshape", "l", "shape", output="f"),
            node("Dropout", "f"),
        ],
        {
            "w": RNG.normal(size=(4, 4, 3, 3)).astype(np.float32),
            "b": RNG.normal(size=4).astype(np.float32),
            "one": np.ones(4, np.float32),
            "shape": np.array([-1]),
            **({} if opset < 18 else {"axes": np.array([2, 3])}),
        },
        opset=opset,
    )


@pytest.mark.parametrize("opset", range(13, 22))
def test_opsets_that_onnx_runtime_supports(opset: int) -> None:
    original = small_network(opset)
    if opset >= 18:
        # With no axes, ReduceL2 reduces all of them.
        original.graph.node[7].input.append("last")
        original.graph.initializer.append(numpy_helper.from_array(np.array([-1]), "last"))
    ready, notes = prepare(original)
    assert is_in_form(ready)
    assert notes == ([] if opset == 18 else [f"opset {opset} converted to 18"])
    np.testing.assert_allclose(run(ready, X), run(original, X), rtol=1e-6)


def test_a_transpose_that_moves_nothing_is_gone() -> None:
    """ONNX Runtime's optimiser assumes that any Transpose before a Gemm swaps the axes: y is wrong with it."""
    weights = {"w": RNG.normal(size=(4, 4)).astype(np.float32), "b": RNG.normal(size=4).astype(np.float32)}
    x = RNG.normal(size=(4, 4)).astype(np.float32)
    nodes = [
        helper.make_node("Transpose", ["w"], ["same"], "same", perm=[0, 1]),
        helper.make_node("Transpose", ["same"], ["again"], "again", perm=[0, 1]),
        helper.make_node("Gemm", ["x", "again", "b"], ["h"], "gemm"),
        helper.make_node("Transpose", ["h"], ["y"], "last", perm=[0, 1]),
    ]
    described = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", described[:1], described[1:], tensors)
    ready, _ = prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))
    assert [node.op_type for node in ready.graph.node] == ["Gemm", "Identity"]
    np.testing.assert_allclose(run(ready, x), x @ weights["w"] + weights["b"], rtol=1e-5, atol=1e-6)


def test_split_by_count_in_an_opset_without(tmp_path: Path) -> None:
    """What torch's dynamo exporter writes for opset 17."""
    split = helper.make_node("Split", ["x"], ["a", "b"], "split", axis=3, num_outputs=2)
    path = tmp_path / "model.onnx"
    path.write_bytes(model([split, node("Sub", "a", "b")], opset=17).SerializeToString())
    ready, _ = prepare(read_model(path))
    np.testing.assert_array_equal(run(ready, X), X[..., :3] - X[..., 3:])


@pytest.mark.parametrize("opset", [9, 11, 12])
def test_older_opsets_go_through_the_converter(opset: int) -> None:
    weight = RNG.normal(size=(6, 1000)).astype(np.float32)
    original = model([node("MatMul", "x", "w", output="a"), node("Softmax", "a", axis=-1)], {"w": weight}, opset=opset)
    ready, notes = prepare(original)
    assert is_in_form(ready)
    assert says(notes[0], f"opset {opset} … 13 …")
    np.testing.assert_array_equal(numpy_helper.to_array(ready.graph.initializer[0]), weight)
    # Up to opset 12, Softmax flattens the axes after its own; after the last there are none.
    np.testing.assert_allclose(run(ready, X), run(original, X), atol=1e-7)


NEW = [
    (22, [node("HardSwish", "x")], {}),
    (20, [node("Gelu", "x")], {}),
    (20, [node("Gelu", "x", approximate="tanh")], {}),
    (21, [node("GroupNormalization", "x", "s", "b", num_groups=2)], {"s": np.arange(4.0), "b": np.arange(4.0)}),
    (23, [node("RMSNormalization", "x", "s", axis=-1)], {"s": np.arange(6.0)}),
    (23, [node("Attention", "x", "x", "x", is_causal=1)], {}),
    (23, [node("Attention", "x", "x", "x", "mask", scale=0.3)], {"mask": RNG.normal(size=(6, 6))}),
    (24, [node("Swish", "x", alpha=0.5)], {}),
    (23, [node("RotaryEmbedding", "x", "c", "s")], {"c": RNG.normal(size=(2, 6, 3)), "s": RNG.normal(size=(2, 6, 3))}),
    (19, [node("Pad", "x", "p", mode="wrap")], {"p": np.array([0, 0, 1, 2, 0, 0, 0, 1])}),
    (22, [node("AveragePool", "x", kernel_shape=[3, 3], dilations=[1, 1])], {}),
    (22, [node("Cast", "x", to=1)], {}),
]


@pytest.mark.parametrize(("opset", "nodes", "tensors"), NEW, ids=lambda v: v[0].op_type if isinstance(v, list) else "")
def test_newer_operators_are_written_out(opset: int, nodes: list[onnx.NodeProto], tensors: dict[str, Any]) -> None:
    arrays = {n: a if a.dtype == np.int64 else a.astype(np.float32) for n, a in tensors.items()}
    original = model(nodes, arrays, opset=opset)
    ready, _ = prepare(original)
    assert is_in_form(ready)
    assert {n.domain for n in ready.graph.node} == {""}
    expected = run(original, X) if opset <= 21 else ReferenceEvaluator(original).run(["y"], {"x": X})[0]
    np.testing.assert_allclose(run(ready, X), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("opset", "bad"),
    [
        (19, node("AveragePool", "x", kernel_shape=[2, 2], dilations=[2, 2])),
        (24, helper.make_node("TensorScatter", ["x", "x"], ["y"], "scatter")),
        (19, node("Resize", "x", "", "s", coordinate_transformation_mode="half_pixel_symmetric", mode="linear")),
    ],
    ids=lambda value: getattr(value, "op_type", ""),
)
def test_what_has_no_older_form_is_named(opset: int, bad: onnx.NodeProto) -> None:
    scales = {"s": np.array([1, 1, 2, 2], np.float32)} if bad.op_type == "Resize" else {}
    original = model([bad], scales, opset=opset)
    if bad.op_type == "Resize":
        # Resize itself has a form: it is composed from its own values.
        np.testing.assert_allclose(run(prepare(original)[0], X), run(original, X), atol=1e-5)
        return
    with pytest.raises(UserError, match=rf"\({bad.op_type}\), of opset {opset}.*opset 18.*export"):
        prepare(original)


def test_an_opset_to_come() -> None:
    with pytest.raises(UserError, match=r"opset 99.*export"):
        prepare(model([node("Relu", "x")], opset=99))


def test_newer_ir_version_is_lowered() -> None:
    ready, notes = prepare(model([node("Relu", "x")], ir_version=13))
    assert ready.ir_version == 10
    assert notes == ["IR version 13 converted to 10"]


def test_functions_are_inlined() -> None:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    inner = helper.make_function("own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], opsets)
    scaled = helper.make_node("Celu", ["d"], ["e"])
    scaled.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT))
    outer = helper.make_function(
        "own",
        "Block",
        ["c", "unused"],
        ["e", "c2"],
        [helper.make_node("Twice", ["c"], ["d"], domain="own"), scaled, helper.make_node("Identity", ["c"], ["c2"])],
        opsets,
        attributes=["alpha"],
    )
    original = model(
        [
            helper.make_node("Block", ["x"], ["h", "same"], "first", domain="own", alpha=0.5),
            helper.make_node("Block", ["h"], ["i"], "second", domain="own", alpha=2.0),
            node("Add", "i", "same"),
        ]
    )
    original.functions.extend([outer, inner])
    original.opset_import.append(helper.make_opsetid("own", 1))
    ready, _ = prepare(original)
    assert is_in_form(ready)

    def celu(values: np.ndarray, alpha: float) -> np.ndarray:
        return np.maximum(values, 0) + np.minimum(alpha * np.expm1(values / alpha), 0)

    # ONNX Runtime itself aborts the process on a function with an unread input.
    np.testing.assert_allclose(run(ready, X), celu(2 * celu(2 * X, 0.5), 2.0) + X, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16])
def test_other_precisions_become_single(kind: int) -> None:
    weight = helper.make_tensor("w", kind, [6, 3], np.arange(18.0) / 8)
    original = model(
        [node("MatMul", "x", "w", output="a"), node("Cast", "a", output="b", to=kind), node("Mul", "b", "b")], kind=kind
    )
    original.graph.initializer.append(weight)
    ready, notes = prepare(original)
    assert len(notes) == 1
    assert "converted to fp32" in notes[0]
    expected = (X @ (np.arange(18.0).reshape(6, 3) / 8)) ** 2
    np.testing.assert_allclose(run(ready, X), expected, rtol=1e-4, atol=1e-4)
    assert {v.type.tensor_type.elem_type for v in (*ready.graph.input, *ready.graph.output)} == {TensorProto.FLOAT}


def test_a_double_mask_stays_finite() -> None:
    mask = np.array([0, np.finfo(np.float64).min])
    original = model([node("Add", "x", "m")], {"m": mask}, kind=TensorProto.DOUBLE, shape=(2,))
    ready, _ = prepare(original)
    np.testing.assert_array_equal(numpy_helper.to_array(ready.graph.initializer[0]), [0, np.finfo(np.float32).min])


def test_negative_sizes_are_unknown() -> None:
    """Paddle2ONNX writes -1 for any size. onnx's inference of the Slice ends the process otherwise."""
    slice_ = helper.make_node("Slice", ["x", "start", "end"], ["y"], "slice")
    given = model([slice_], {"start": np.array([0]), "end": np.array([1])}, shape=(-1, 4, 6, -1))
    prepared, _ = prepare(given)
    (x,) = prepared.graph.input
    sizes = [dim.WhichOneof("value") and dim.dim_value for dim in x.type.tensor_type.shape.dim]
    assert sizes == [None, 4, 6, None]


def test_initializers_among_the_inputs() -> None:
    original = model([node("MatMul", "x", "w")], {"w": np.ones((6, 2), np.float32)}, opset=13, ir_version=3)
    original.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [6, 2]))
    ready, _ = prepare(original)
    assert [value.name for value in ready.graph.input] == ["x"]


def test_weights_in_constant_nodes_become_initializers() -> None:
    weight = numpy_helper.from_array(np.ones((6, 2), np.float32))
    ready, _ = prepare(model([helper.make_node("Constant", [], ["w"], value=weight), node("MatMul", "x", "w")]))
    assert [tensor.name for tensor in ready.graph.initializer] == ["w"]
    assert [n.op_type for n in ready.graph.node] == ["MatMul"]


def test_unused_weights_and_nodes_are_dropped() -> None:
    ones = np.ones((6, 2), np.float32)
    ready, _ = prepare(
        model([node("MatMul", "x", "w"), node("MatMul", "x", "v", output="z")], {"w": ones, "v": ones, "u": ones})
    )
    assert [tensor.name for tensor in ready.graph.initializer] == ["w"]
    assert len(ready.graph.node) == 1


class TestAliases:
    """Equal weights as TorchScript's exporter writes them."""

    def test_a_tied_weight_is_one_parameter(self) -> None:
        weight = RNG.normal(size=(6, 6)).astype(np.float32)
        original = model(
            [node("Identity", "w", output="v"), node("MatMul", "x", "w", output="a"), node("MatMul", "a", "v")],
            {"w": weight},
        )
        ready, notes = prepare(original)
        assert notes == []
        assert [n.op_type for n in ready.graph.node] == ["MatMul", "MatMul"]
        assert [tensor.name for tensor in ready.graph.initializer] == ["w"]
        np.testing.assert_array_equal(run(ready, X), run(original, X))

    def test_merged_norm_weights_are_separated(self) -> None:
        original = model(
            [
                node("Identity", "norm1.weight", output="norm2.weight"),
                node("LayerNormalization", "x", "norm1.weight", "b", output="a"),
                node("LayerNormalization", "a", "norm2.weight", "b"),
            ],
            {"norm1.weight": np.ones(6, np.float32), "b": np.arange(6, dtype=np.float32)},
        )
        ready, notes = prepare(original)
        assert {tensor.name for tensor in ready.graph.initializer} == {"norm1.weight", "norm2.weight", "b"}
        assert alike(notes, ["… separated: norm2.weight"])
        np.testing.assert_array_equal(run(ready, X), run(original, X))

    def test_a_transposed_copy_is_tied_again(self) -> None:
        weight = RNG.normal(size=(6, 3)).astype(np.float32)
        copy = np.ascontiguousarray(weight.T)
        original = model(
            [node("MatMul", "x", "emb.weight", output="a"), node("MatMul", "a", "onnx::MatMul_9")],
            {"emb.weight": weight, "onnx::MatMul_9": copy},
        )
        ready, notes = prepare(original)
        assert [tensor.name for tensor in ready.graph.initializer] == ["emb.weight"]
        assert alike(notes, ["onnx::MatMul_9 is emb.weight transposed …"])
        np.testing.assert_array_equal(run(ready, X), run(original, X))

    def test_an_output_that_is_a_weight_stays(self) -> None:
        original = model([node("Identity", "w")], {"w": np.arange(6, dtype=np.float32)})
        assert [n.op_type for n in prepare(original)[0].graph.node] == ["Identity"]


@pytest.mark.parametrize("depth", [1, 2])
def test_combining_scatters_lose_nothing(depth: int) -> None:
    """Many updates of few elements on two threads, where ONNX Runtime's own ScatterND loses some."""
    count = 20_000
    shape = (3, 4, 5)
    indices = RNG.integers(-3, 3, size=(count, depth))
    updates = np.ones((count, *shape[depth:]), np.float32)
    scatter = helper.make_node("ScatterND", ["x", "i", "u"], ["y"], "scatter", reduction="add")
    original = model([scatter], {"i": indices, "u": updates}, shape=shape)
    ready, notes = prepare(original)
    assert "written as ScatterElements" in notes[0]
    expected = np.zeros(shape, np.float32)
    np.add.at(expected, tuple(indices.T), updates)
    for _ in range(3):
        np.testing.assert_array_equal(run(ready, np.zeros(shape, np.float32), threads=2), expected)


def test_the_model_that_was_given_is_left_alone() -> None:
    original = small_network(13)
    before = original.SerializeToString(deterministic=True)
    prepare(original)
    assert original.SerializeToString(deterministic=True) == before
