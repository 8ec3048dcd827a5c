"""Our operators on a GPU: numbers against double precision, the same bits twice, and sizes that only a GPU can hold."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from operators_on_gpu import (
    BF16,
    FLOAT,
    FP16,
    INT64,
    JOINED,
    KINDS,
    ROUNDING,
    Array,
    check,
    check_batch_norm,
    check_channels_last,
    check_column_sums,
    check_cross_entropy,
    check_join,
    check_max_pool,
    check_norms,
    check_pixel_means,
    check_rotary,
    check_softmax,
    check_table_gradient,
    stored,
    twice,
)

from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

MIXED = [*((kind,) * 4 for kind in KINDS), (FLOAT, BF16, BF16, FLOAT), (FP16, FLOAT, FLOAT, FP16)]


class OnGpu:
    """See operators_on_gpu.Compute: a session of one node, with casts around it."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._sessions = Sessions(device, 1, "error")
        self._bindings: dict[bytes, Binding] = {}

    def __call__(
        self, operator: str, attributes: dict[str, Any], inputs: Sequence[Any], types: Sequence[int]
    ) -> list[Array]:
        model = node_model(operator, attributes, [each and each[1] for each in inputs], types)
        content = model.SerializeToString()
        if content not in self._bindings:
            self._bindings[content] = Binding(self._sessions.open(content, as_written=True), self._device)
        binding = self._bindings[content]
        for place, each in enumerate(inputs):
            if each is not None:
                binding.feed(f"in.{place}", each[0])
        return list(binding.fetch([f"out.{place}" for place in range(len(types))]))


def node_model(
    operator: str, attributes: dict[str, Any], kinds: Sequence[int | None], types: Sequence[int]
) -> onnx.ModelProto:
    """A model of one node; without a kind an input is left out."""
    nodes, given, made = [], [], []
    for place, kind in enumerate(kinds):
        given.append("" if kind is None else f"in.{place}" if kind in (FLOAT, INT64) else f"in.{place}.cast")
        if kind not in (None, FLOAT, INT64):
            nodes.append(helper.make_node("Cast", [f"in.{place}"], [given[-1]], to=kind))
    for place, kind in enumerate(types):
        made.append(f"out.{place}" if kind == FLOAT else f"out.{place}.half")
    nodes.append(helper.make_node(operator, given, made, name="node", domain=CUDA_DOMAIN, **attributes))
    for place, kind in enumerate(types):
        if kind != FLOAT:
            nodes.append(helper.make_node("Cast", [made[place]], [f"out.{place}"], to=TensorProto.FLOAT))
    graph = helper.make_graph(
        nodes,
        "graph",
        [
            helper.make_tensor_value_info(f"in.{place}", INT64 if kind == INT64 else FLOAT, None)
            for place, kind in enumerate(kinds)
            if kind is not None
        ],
        [helper.make_tensor_value_info(f"out.{place}", FLOAT, None) for place in range(len(types))],
        value_info=[
            helper.make_tensor_value_info(name, kind, None)
            for name, kind in (*zip(given, kinds, strict=True), *zip(made, types, strict=True))
            if name.endswith((".cast", ".half"))
        ],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.fixture(scope="module")
def compute(device: CudaDevice) -> OnGpu:
    return OnGpu(device)


def kinds_of(*numbers: int, count: int) -> tuple[int, ...]:
    """Random element types, the same for the same numbers."""
    random = np.random.default_rng(zlib.crc32(repr(numbers).encode()))
    return tuple(int(kind) for kind in random.choice(KINDS, count))


def sizes(seed: int, count: int, most: Sequence[int]) -> list[tuple[int, ...]]:
    """Random shapes, small and large, a third of them of odd widths."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        dims = [int(np.exp(random.uniform(0, np.log(limit)))) for limit in most]
        if random.random() < 0.67:
            dims[-1] = max(8, dims[-1] // 8 * 8)
        found.append(tuple(dims))
    return found


NORMS = [
    (1, 1), (1, 768), (16384, 768), (3, 769), (5000, 96), (70_000, 8), (33, 2048), (5, 4096), (7, 8191), (300, 1024),
    (2, 32_768), (3, 40_000), (3, 33_001), (1, 1_000_003), (4, 16, 12, 64), *sizes(0, 12, (3000, 5000)),
]  # fmt: skip


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dims", NORMS, ids=str)
def test_norms(compute: OnGpu, dims: tuple[int, ...], rms: bool) -> None:
    for kinds in MIXED if dims in NORMS[:4] else [kinds_of(*dims, rms, count=4)]:
        check_norms(compute, dims, tuple(kinds), rms=rms, bias=sum(dims) % 3 != 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize("dims", NORMS, ids=str)
def test_gradients_of_norms_with_a_residual(compute: OnGpu, dims: tuple[int, ...], rms: bool) -> None:
    every = [(*kinds, kind) for kinds, kind in zip(MIXED, (*KINDS, FP16, BF16), strict=True)]
    for *kinds, residual in every if dims in NORMS[:4] else [kinds_of(*dims, rms, 1, count=5)]:
        check_norms(compute, dims, tuple(kinds), rms=rms, residual=residual)  # type: ignore[arg-type]


LOSSES = [
    (1, 1), (1, 50_257), (700, 50_257), (64, 50_304), (2, 1_000_001), (5000, 10), (30_000, 2), (77, 1024), (77, 1025),
    (300, 8192), (50, 8193), (9, 53_248), (9, 53_257), (40, 24_577), *sizes(1, 10, (500, 40_000)),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "classes"), LOSSES)
def test_cross_entropy(compute: OnGpu, rows: int, classes: int) -> None:
    every = [(FLOAT, FLOAT), (FP16, FP16), (BF16, BF16), (FP16, FLOAT), (FLOAT, BF16)]
    for kinds in every if (rows, classes) in LOSSES[:4] else [kinds_of(rows, classes, count=2)]:
        check_cross_entropy(compute, rows, classes, *kinds)


@pytest.mark.parametrize("label", [-1, 40, -(2**63), 2**40])
def test_a_label_out_of_range_gives_nan(compute: OnGpu, label: int) -> None:
    scores, labels = stored(np.zeros((3, 40)), FP16), stored(np.array([1, label, 2]), INT64)
    loss, lse = compute("CrossEntropy", {"ignore": -100}, [labels, scores], [FLOAT, FLOAT])
    assert np.isnan(loss)
    given = [labels, (np.array(1, np.float32), FLOAT), scores, (lse, FLOAT)]
    (dscores,) = compute("CrossEntropyGrad", {"ignore": -100}, given, [FP16])
    both = compute("CrossEntropyWithGrad", {"ignore": -100}, given[:3], [FLOAT, FP16])
    assert np.isnan(both[0])
    for each in (dscores, both[1]):
        assert np.isnan(each[1]).all()
        assert np.isfinite(each[[0, 2]]).all()


SUMS = [
    (1, 1), (16384, 3072), (16384, 768), (3, 7), (100_000, 12), (5000, 257), (1, 300), (3, 1_000_003), (200_000, 1),
    (16, 1024, 768), (4, 9, 5, 33), *sizes(2, 10, (20_000, 5000)),
]  # fmt: skip


@pytest.mark.parametrize("dims", SUMS, ids=str)
def test_column_sums(compute: OnGpu, dims: tuple[int, ...]) -> None:
    for kind in KINDS if dims in SUMS[:3] else kinds_of(*dims, count=1):
        check_column_sums(compute, dims, kind)
    if len(dims) > 2:
        check_column_sums(compute, dims, FP16, 1)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 64, 4096, 4097, 12_345_678, 124_000_064])
def test_sum_of_squares(compute: OnGpu, count: int) -> None:
    values = np.random.default_rng(count).normal(0, 3, count).astype(np.float32)
    (found,) = compute("SquareSum", {}, [stored(values, FLOAT)], [int(TensorProto.DOUBLE)])
    np.testing.assert_allclose(found, [np.sum(values.astype(np.float64) ** 2)], rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "dims", "width", "skew"),
    [
        (50_257, (16, 1024), 768, 4), (1024, (16, 1024), 768, 1), (2, (16_384,), 768, 1), (1, (300_000,), 8, 1),
        (32, (700, 700), 12, 1), (2_000_000, (5000,), 16, 2), (169, (49, 49), 3, 1), (1, (1,), 1, 1),
        (30_000, (40, 100), 1025, 3), (128_256, (2048,), 4096, 3),
    ],
)  # fmt: skip
def test_gradients_of_tables(compute: OnGpu, rows: int, dims: tuple[int, ...], width: int, skew: float) -> None:
    for of_gradient, of_table in ((FP16, FLOAT), (BF16, BF16)) if rows < 60_000 else ((FP16, FP16),):
        check_table_gradient(compute, rows, dims, width, of_gradient, of_table, skew=skew)


@pytest.mark.parametrize("index", [9, -10, 2**40])
def test_an_index_out_of_range_gives_nan(compute: OnGpu, index: int) -> None:
    given = [stored(np.array([1, index, 2]), INT64), stored(np.zeros((3, 8)), FP16)]
    (table,) = compute("TableGrad", {"rows": 9}, given, [FLOAT])
    assert np.isnan(table).all()


SOFTMAXES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((4, 12, 512, 512), (512, 512)), ((4, 12, 197, 197), (4, 1, 1, 197)), ((3, 300), (3, 1)), ((3, 1), (4, 3, 9)),
    ((50, 1024), None), ((7,), ()), ((2, 1, 4, 8), (3, 1, 8)), ((3, 40_000), (40_000,)), ((2, 33_001), None),
    ((1, 1_000_003), None), ((100_000, 4), None), *((dims, None) for dims in sizes(3, 8, (5000, 9000))),
]  # fmt: skip


@pytest.mark.parametrize(("dims", "mask"), SOFTMAXES, ids=str)
def test_softmax(compute: OnGpu, dims: tuple[int, ...], mask: tuple[int, ...] | None) -> None:
    check_softmax(compute, dims, mask, kinds_of(*dims, count=4))  # type: ignore[arg-type]


ROTATED: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((4, 32, 512, 64), (1, 1, 512, 64)), ((2, 3, 77, 80), (2, 1, 77, 80)), ((3, 5, 9, 6), (9, 6)), ((1, 1, 1, 2), (2,)),
]  # fmt: skip


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(("dims", "table"), ROTATED, ids=str)
def test_rotary_positions(compute: OnGpu, dims: tuple[int, ...], table: tuple[int, ...], *, tokens_first: bool) -> None:
    check_rotary(compute, dims, table, kinds_of(*dims, count=2), tokens_first=tokens_first)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("a", "columns", "residual"),
    [((8, 96), 64, None), ((8, 96), 64, (8, 64)), ((3, 7, 40), 33, (3, 7, 33)), ((2, 512, 768), 768, (2, 512, 768)),
     ((3, 7, 40), 24, (1, 7, 24)), ((1, 7, 40), 24, (3, 7, 24)), ((3, 1, 8), 9, (1, 5, 9)), ((0, 8), 8, (1, 8))],
    ids=str,
)  # fmt: skip
def test_products(
    compute: OnGpu, a: tuple[int, ...], columns: int, residual: tuple[int, ...] | None, kind: int
) -> None:
    random = np.random.default_rng(columns)
    x, w = (stored(random.normal(size=dims), kind) for dims in (a, (a[-1], columns)))
    bias, past = (stored(random.normal(size=dims), kind) for dims in ((columns,), residual or ()))
    for given in ([x, w], [x, w, bias], [x, w, None, past], [x, w, bias, past]):
        if len(given) > 3 and residual is None:
            continue
        expected = x[0].astype(np.float64) @ w[0]
        for added in (each for each in given[2:] if each is not None):
            expected = expected + added[0]
        (found,) = twice(compute, "Product", {}, given, [kind])
        # Where rows are not aligned, cuBLASLt adds the bias and the residual to a product that it has rounded.
        rounded = residual is not None and (residual[:-1] != a[:-1] or columns % 8)
        check("Product", found, expected, kind, 2 * ROUNDING[kind] if rounded else 1e-5)


BATCHES = [
    (16, 56, 56, 64),
    (8, 7, 7, 2048),
    (16, 28, 28, 256),
    (300, 24),
    (7, 5),
    (4, 28, 28, 130),
    (3, 40_000),
    *sizes(5, 6, (9000, 900)),
]


@pytest.mark.parametrize("dims", BATCHES, ids=str)
def test_batch_norms(compute: OnGpu, dims: tuple[int, ...]) -> None:
    for kinds in [(kind, kind) for kind in KINDS] if dims in BATCHES[:2] else [kinds_of(*dims, count=2)]:
        check_batch_norm(compute, dims, *kinds)


POOLS = [
    ((4, 112, 112, 64), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
    ((2, 30, 31, 24), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1)),
    ((3, 17, 13, 5), (3, 2), (1, 2), (1, 0, 1, 1), (1, 1)),
    ((2, 20, 21, 16), (3, 3), (2, 3), (2, 2, 2, 2), (2, 2)),
]


@pytest.mark.parametrize("dims", [(128, 7, 7, 2048), (70_000, 2, 1, 8), (3, 112, 112, 64), (5, 9, 7, 33)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_means_over_pixels(compute: OnGpu, dims: tuple[int, ...], kind: int) -> None:
    check_pixel_means(compute, dims, kind)


@pytest.mark.parametrize("dims", [(128, 3, 224, 224), (64, 3, 7, 7), (5, 1, 33, 31), (2, 8, 9, 9)], ids=str)
def test_few_channels_are_padded(compute: OnGpu, dims: tuple[int, ...]) -> None:
    for kinds in ((FLOAT, BF16), (FP16, FP16), (FLOAT, FP16)):
        check_channels_last(compute, dims, *kinds)


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_max_pooling(compute: OnGpu, pool: Any) -> None:
    dims, kernel, strides, pads, dilations = pool
    for kinds in [(kind,) * 3 for kind in KINDS]:
        check_max_pool(compute, dims, kernel, strides, pads, kinds, dilations=dilations)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("sizes", "axis"), [*JOINED, ([(64, 37, 1000), (64, 3, 1000)], 1)], ids=str)
def test_joined_values_lie_side_by_side(compute: OnGpu, sizes: list[tuple[int, ...]], axis: int, kind: int) -> None:
    check_join(compute, sizes, axis, kind)


SCALE = 1024
"""Of the loss: without, gradients are too small for fp16."""


def test_more_elements_than_32_bits_count(device: CudaDevice) -> None:
    """Scores of more than 2^31 elements in fp16, made on the GPU: exp(1) for a class, exp(0) for the others."""
    if device.gpu.free < 40 << 30:
        pytest.skip("needs a GPU with 40 GiB free")
    rows, classes = 43_000, 50_257
    assert rows * classes > 2**31
    nodes = [
        helper.make_node("CrossEntropy", ["labels", "scores"], ["loss", "lse"], domain=CUDA_DOMAIN),
        helper.make_node("CrossEntropyGrad", ["labels", "scale", "scores", "lse"], ["dscores"], domain=CUDA_DOMAIN),
        helper.make_node("ColumnSums", ["dscores"], ["sums"], domain=CUDA_DOMAIN),
    ]
    info = functools.partial(helper.make_tensor_value_info, shape=None)
    graph = helper.make_graph(
        nodes,
        "graph",
        [info("scores", FP16), info("labels", INT64), info("scale", FLOAT)],
        [info("loss", FLOAT), info("lse", FLOAT), info("sums", FLOAT)],
        value_info=[info(name, FP16) for name in ("dscores",)],
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(CUDA_DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    binding = Binding(Sessions(device, 1, "error").open(model.SerializeToString(), as_written=True), device)
    binding.read_from("scores", device.allocate(rows * classes, np.float16), (rows, classes))
    labels = np.full(rows, 7)
    labels[-1] = classes - 1
    for name, array in (("labels", labels), ("scale", np.array(SCALE, np.float32))):
        binding.feed(name, array)
    loss, lse, sums = binding.fetch(["loss", "lse", "sums"])
    expected = np.log(classes)
    check("loss", loss, np.array(rows * expected), FLOAT)
    check("lse", lse, np.full(rows, expected), FLOAT)
    probabilities = np.full(classes, 1 / classes)
    gradient = rows * probabilities
    gradient[7] -= rows - 1
    gradient[-1] -= 1
    gradient *= SCALE
    # The gradient is stored in fp16: each element of it is right to 2^-11.
    bound = 2.0**-11 * SCALE * (rows * probabilities + (np.arange(classes) == 7) * rows) + 1e-2 * SCALE
    assert (np.abs(sums - gradient) <= bound).all(), np.abs(sums - gradient).max()
