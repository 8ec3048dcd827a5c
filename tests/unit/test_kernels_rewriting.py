"""Random small graphs compute the same with our operators as the original graph with ONNX Runtime's.

Each graph is a chain of products with the nodes around them in models: transposes of any order, scales, biases and
masks of every broadcast shape, sums, normalisations, activations, and second readers at any place. A case that
fails is printed as its nodes; its number is the seed that reproduces it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from kernels import LEVELS, Array, library_of, needs_kernels
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.normalize.tidy import drop_transposes_that_move_nothing
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.onnx_runtime import onnxruntime as ort

pytestmark = needs_kernels
CASES = 500
SIZES = (1, 2, 3, 4, 5, 7, 9, 17)
MICROSOFT = ("FusedMatMul", "SoftmaxGrad_13", "Gelu", "FastGelu")


class Draft:
    """A graph that grows by random pieces; every value's shape is known."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.feeds: dict[str, Array] = {}
        self.constants: dict[str, Array] = {}
        self.dims: dict[str, tuple[int, ...]] = {}
        self.outputs: set[str] = set()

    def chance(self, share: float) -> bool:
        return bool(self.random.random() < share)

    def pick(self, *choices: Any) -> Any:
        return choices[int(self.random.integers(len(choices)))]

    def input(self, dims: Sequence[int]) -> str:
        name = f"x{len(self.feeds)}"
        self.feeds[name] = np.asarray(self.random.standard_normal(tuple(dims)) * 0.5, np.float32)
        self.dims[name] = tuple(dims)
        return name

    def constant(self, array: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        self.dims[name] = array.shape
        return name

    def node(self, operator: str, inputs: Sequence[str], dims: Sequence[int], **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        outputs = [name, f"{name}.mean", f"{name}.inverse"] if operator == "LayerNormalization" else [name]
        domain = "com.microsoft" if operator in MICROSOFT else ""
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=name, domain=domain, **attributes))
        self.dims[name] = tuple(dims)
        if self.chance(0.06):
            self.outputs.add(name)  # a second reader
        return self.node("Identity", [name], dims) if self.chance(0.05) else name

    def turned(self, value: str) -> str:
        """The value, or a Transpose of it that is not undone later."""
        order = [int(axis) for axis in self.random.permutation(len(self.dims[value]))]
        return self.node("Transpose", [value], [self.dims[value][axis] for axis in order], perm=order)

    def seen(self, dims: Sequence[int]) -> str:
        """A new value of these dims, by a Transpose of an input or as the input itself."""
        if self.chance(0.4):
            return self.input(dims)
        order = [int(axis) for axis in self.random.permutation(len(dims))]
        stored = [dims[order.index(axis)] for axis in range(len(dims))]
        return self.node("Transpose", [self.input(stored)], dims, perm=order)

    def spread(self, value: str) -> str:
        """A new value that broadcasts to this one."""
        dims = [1 if self.chance(0.3) else size for size in self.dims[value]]
        return self.input(dims[self.pick(0, len(dims) - 1, len(dims) - 1, len(dims)) :])

    def scaled(self, value: str) -> str:
        number = self.constant(np.full(self.pick((), (), (1,)), self.pick(0.125, -2.0, 3.0), np.float32))
        operator = self.pick("Mul", "Mul", "Div")
        pair = [value, number] if operator == "Div" or self.chance(0.5) else [number, value]
        return self.node(operator, pair, self.dims[value])

    def added(self, value: str) -> str:
        other = value if self.chance(0.05) else self.spread(value)
        return self.node("Add", [value, other] if self.chance(0.5) else [other, value], self.dims[value])

    def product(self, value: str) -> str:
        """A product of the value with a new one, or with its own transpose."""
        *batch, m, k = self.dims[value]
        if self.chance(0.15):
            order = [*range(len(batch)), len(batch) + 1, len(batch)]
            turned = self.node("Transpose", [value], [*batch, k, m], perm=order)
            return self.node("MatMul", [value, turned], [*batch, m, m])
        n, flags = int(self.random.choice(SIZES)), {}
        own = [1 if self.chance(0.2) else size for size in batch][self.pick(0, 0, len(batch)) :]
        operator = self.pick("MatMul", "MatMul", "FusedMatMul", *(["Gemm", "Gemm"] if not batch else []))
        if operator != "MatMul":
            flags = {"transA": 0, "transB": self.pick(0, 1), "alpha": self.pick(1.0, 0.25)}
        left, more = self.chance(0.3), []
        if left:  # the value is the second factor
            other, dims = self.seen([*own, *((m, n) if flags.get("transA") else (n, m))]), [*batch, n, k]
            pair = [other, value]
            flags = {**flags, "transB": 0} if flags else {}
        else:
            other, dims = self.seen([*own, *((n, k) if flags.get("transB") else (k, n))]), [*batch, m, n]
            pair = [value, other]
        if operator == "Gemm" and self.chance(0.6):
            more = [self.input(self.pick(dims[-1:], (1,), dims, ()))]
            flags["beta"] = self.pick(1.0, 1.0, 0.5)
        return self.node(operator, [*pair, *more], dims, **flags)

    def normal(self, value: str) -> str:
        width = self.dims[value][-1]
        vectors = [self.input([width]) for _ in range(self.pick(1, 2))]
        return self.node("LayerNormalization", [value, *vectors], self.dims[value], axis=-1, epsilon=0.1)

    def softmax(self, value: str) -> str:
        rank = len(self.dims[value])
        axis = self.pick(-1, -1, rank - 1, 0)
        made = self.node("Softmax", [value], self.dims[value], axis=axis)
        if self.chance(0.5):
            made = self.node("SoftmaxGrad_13", [self.input(self.dims[value]), made], self.dims[value], axis=axis)
        return made

    def summed(self, value: str) -> str:
        rank = len(self.dims[value])
        axes, keep = self.pick(list(range(rank - 1)), [0], [rank - 1]), self.pick(0, 0, 1)
        dims = [1 if axis in axes else size for axis, size in enumerate(self.dims[value]) if keep or axis not in axes]
        if len(dims) < 2:
            self.outputs.add(self.node("ReduceSum", [value, self.constant(np.array(axes))], dims, keepdims=keep))
            return value
        return self.node("ReduceSum", [value, self.constant(np.array(axes))], dims, keepdims=keep)

    def gelu(self, value: str) -> str:
        return self.node(self.pick("Gelu", "FastGelu"), [value], self.dims[value])

    def grown(self) -> Draft:
        batch = [int(size) for size in self.random.choice(SIZES[:5], int(self.random.integers(0, 3)))]
        value = self.seen([*batch, *(int(size) for size in self.random.choice(SIZES, 2))])
        pieces = [self.product, self.product, self.turned, self.turned, self.scaled, self.added]
        pieces += [self.softmax, self.normal, self.summed, self.gelu]
        for _ in range(int(self.random.integers(2, 8))):
            value = self.pick(*pieces)(value)
        self.outputs.add(value)
        return self

    def model(self) -> onnx.ModelProto:
        symbolic = self.chance(0.3)

        def described(name: str, dims: tuple[int, ...] | None) -> onnx.ValueInfoProto:
            named = [f"{name}.{axis}" if symbolic and axis == 0 else size for axis, size in enumerate(dims or ())]
            return helper.make_tensor_value_info(name, TensorProto.FLOAT, None if dims is None else named)

        graph = helper.make_graph(
            self.nodes,
            "random",
            [described(name, self.dims[name]) for name in self.feeds],
            [described(name, None) for name in sorted(self.outputs)],
            [numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=9)
        drop_transposes_that_move_nothing(model)
        return onnx.shape_inference.infer_shapes(model)


def results(model: onnx.ModelProto, feeds: dict[str, Array], library: Path | None) -> list[Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    if library is None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    else:
        options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return list(session.run(None, {name: array for name, array in feeds.items() if name in names}))


@pytest.mark.parametrize("level", LEVELS)
def test_random_graphs_compute_the_same(level: str) -> None:
    library, met = library_of(level), Counter[str]()
    for seed in range(CASES):
        draft = Draft(seed).grown()
        model = draft.model()
        ours = with_kernels(model)
        met += Counter(node.op_type for node in ours.graph.node if node.domain == "ortflow")
        expected = results(compose(model), draft.feeds, None)
        found = results(compose(ours), draft.feeds, library)
        for name, one, other in zip(sorted(draft.outputs), expected, found, strict=True):
            case = f"case {seed}, output {name}\n{onnx.printer.to_text(model)}\n{onnx.printer.to_text(ours)}"
            assert one.shape == other.shape, case
            difference = np.abs(one - other).max(initial=0)
            assert difference <= 2e-5 * max(1e-3, np.abs(one).max(initial=0)), f"{difference} off: {case}"
    kinds = {"Product", "Softmax", "SoftmaxGrad", "LayerNormalization", "ColumnSums", "Gelu"}
    assert kinds <= met.keys()
    assert min(met.values()) > CASES / 20
    shared_away = sum(met[kind] for kind in kinds)
    assert shared_away > CASES
