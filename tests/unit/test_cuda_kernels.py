"""Our operators for GPUs, computed on the CPU from the same source; NVRTC compiles every source."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from emulated_cuda import EmulatedCall, from_bytes, needs_emulation, to_bytes
from operators_on_gpu import (
    BF16,
    FLOAT,
    FP16,
    INT64,
    KINDS,
    UINT8,
    Array,
    check,
    check_batch_norm,
    check_channels_last,
    check_column_sums,
    check_cross_entropy,
    check_max_pool,
    check_norms,
    check_pixel_means,
    check_rotary,
    check_softmax,
    check_table_gradient,
    stored,
)

from ortflow.workflow.cuda import batch_norm, embedding, norm, nvrtc, product, softmax, source
from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.cuda.softmax import spread_shape
from ortflow.workflow.cuda.spread import leading_axes
from ortflow.workflow.cuda.table import HALF, OPERATORS
from ortflow.workflow.errors import OrtflowError

pytestmark = pytest.mark.rotates

MIXED = [(kind,) * 4 for kind in KINDS] + [(FLOAT, BF16, BF16, FLOAT), (FP16, FLOAT, FLOAT, FP16)]


class Emulated:
    """See operators_on_gpu.Compute."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def __call__(
        self, operator: str, attributes: dict[str, Any], inputs: Sequence[Any], types: Sequence[int]
    ) -> list[Array]:
        call = EmulatedCall(inputs, types, self._offset)
        OPERATORS[operator](attributes).run(call)  # type: ignore[arg-type]
        return call.results()


@needs_emulation
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize(
    ("dims", "kinds"),
    list(zip([(2, 19, 24), (9, 768), (3, 1), (3, 769), (2, 1100)], MIXED, strict=True)),
    ids=str,
)
def test_norms(dims: tuple[int, ...], kinds: tuple[int, int, int, int], rms: bool) -> None:
    check_norms(Emulated(), dims, kinds, rms=rms, bias=sum(dims) % 2 == 0)


@needs_emulation
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@pytest.mark.parametrize(
    ("dims", "kinds", "residual"),
    [((2, 19, 24), (FP16,) * 4, FP16), ((9, 768), (BF16,) * 4, BF16), ((3, 769), (FLOAT, FP16, FP16, FLOAT), BF16),
     ((2, 1100), (BF16,) * 4, FLOAT), ((5, 96), (FLOAT,) * 4, FLOAT), ((3, 1), (FP16,) * 4, FP16)],
    ids=str,
)  # fmt: skip
def test_gradients_of_norms_with_a_residual(
    dims: tuple[int, ...], kinds: tuple[int, int, int, int], residual: int, rms: bool
) -> None:
    check_norms(Emulated(), dims, kinds, rms=rms, residual=residual)


@needs_emulation
def test_norms_of_rows_that_do_not_fit_into_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = source.rows_of
    monkeypatch.setattr(norm, "rows_of", lambda width, lanes, *_: layout(width, lanes, 8, 64))
    for width, rms in ((1048, False), (1049, True)):
        check_norms(Emulated(), (3, width), (FP16, FLOAT, FLOAT, BF16), rms=rms)
        check_norms(Emulated(), (3, width), (FP16, FLOAT, FLOAT, BF16), rms=rms, residual=FP16)


@needs_emulation
def test_few_blocks_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "SUMMING", 3)
    check_norms(Emulated(), (101, 264), (FP16,) * 4, rms=False)
    check_norms(Emulated(), (1000, 5), (FLOAT,) * 4, rms=False)


@needs_emulation
@pytest.mark.parametrize("offset", [0, 4, 8])
def test_addresses_that_are_not_multiples_of_16(offset: int) -> None:
    check_norms(Emulated(offset), (9, 64), (FP16, FP16, FLOAT, FP16), rms=False)
    check_norms(Emulated(offset), (9, 64), (FP16,) * 4, rms=False, residual=FLOAT)
    check_column_sums(Emulated(offset), (50, 64), FP16)
    check_cross_entropy(Emulated(offset), 7, 133, FP16, FP16)
    check_cross_entropy(Emulated(offset), 7, 133, FLOAT, FP16)


@needs_emulation
@pytest.mark.parametrize("classes", [1, 5, 9, 133, 1023, 1025, 9001])
def test_cross_entropy(classes: int) -> None:
    for kinds in ((FLOAT, FLOAT), (FP16, FP16), (BF16, FLOAT)):
        check_cross_entropy(Emulated(), 1 if classes > 9000 else 11, classes, *kinds)


@needs_emulation
@pytest.mark.parametrize("classes", [40_003, 53_248, 53_257])
def test_cross_entropy_of_rows_that_fill_registers_and_shared_memory(classes: int) -> None:
    scores, labels = stored(np.zeros((2, classes)), BF16), stored(np.array([1, 2]), INT64)
    call = EmulatedCall([labels, stored(np.array(1), FLOAT), scores], [FLOAT, BF16], run=False)
    OPERATORS["CrossEntropyWithGrad"]({}).run(call)  # type: ignore[arg-type]
    both = ["cross_entropy_both"] if classes < 53_256 else ["cross_entropy", "cross_entropy_gradient"]
    assert [function for _, function in call.launched] == [*both, "total"]
    if classes < 50_000:
        check_cross_entropy(Emulated(), 2, classes, BF16, BF16)


@needs_emulation
def test_scores_and_gradients_that_begin_differently() -> None:
    """The gradient's rows have other multiples of 16 bytes than the scores': vectors cannot be written."""
    call = EmulatedCall(
        [stored(np.array([0, 1]), INT64), stored(np.array(1), FLOAT), stored(np.zeros((2, 133)), FP16)], [FLOAT, FLOAT],
        4, run=False,
    )  # fmt: skip
    OPERATORS["CrossEntropyWithGrad"]({}).run(call)  # type: ignore[arg-type]
    assert [function for _, function in call.launched] == ["cross_entropy", "cross_entropy_gradient", "total"]


@needs_emulation
@pytest.mark.parametrize(("total", "edges"), [(37, [0, 19, 37]), (1500, [0, 30, 1100, 1500])])
@pytest.mark.parametrize("kind", [FLOAT, BF16])
def test_classes_that_parts_share(total: int, edges: list[int], kind: int) -> None:
    compute, random, rows = Emulated(), np.random.default_rng(3), 9
    scores = from_bytes(to_bytes(random.normal(0, 3, (rows, total)), kind), kind, (rows, total))
    given = random.integers(0, total, rows)
    given[3] = -100
    labels, one = stored(given, INT64), (np.array(0.5, np.float32), FLOAT)
    flags = {"ignore": -100}
    loss, lse = compute("CrossEntropy", flags, [labels, (scores, kind)], [FLOAT, FLOAT])
    (whole,) = compute("CrossEntropyGrad", flags, [labels, one, (scores, kind), (lse, FLOAT)], [kind])
    parts = [(start, np.ascontiguousarray(scores[:, start:stop])) for start, stop in itertools.pairwise(edges)]
    of_parts = [{**flags, "start": start, "total": total} for start, _ in parts]
    most, sums, picked = np.array(
        [
            compute("CrossEntropyShare", of_part, [labels, (mine, kind)], [FLOAT] * 3)
            for of_part, (_, mine) in zip(of_parts, parts, strict=True)
        ]
    ).transpose(1, 0, 2)
    largest = most.max(axis=0)
    np.testing.assert_array_equal(largest, scores.max(axis=1))
    over_all = largest + np.log((sums * np.exp(most - largest)).sum(axis=0))
    np.testing.assert_allclose(over_all, lse, rtol=1e-6)
    counted = given != -100
    np.testing.assert_allclose((over_all - picked.sum(axis=0))[counted].sum(), loss, rtol=1e-6)
    dscores = [
        compute("CrossEntropyGrad", of_part, [labels, one, (mine, kind), (lse, FLOAT)], [kind])[0]
        for of_part, (_, mine) in zip(of_parts, parts, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(dscores, axis=1), whole)
    labels[0][5] = total
    share = compute("CrossEntropyShare", of_parts[0], [labels, (parts[0][1], kind)], [FLOAT] * 3)
    assert np.isnan(share[2]).tolist() == [place == 5 for place in range(rows)], "no class"


@needs_emulation
def test_scores_that_are_large_infinite_or_nan() -> None:
    compute = Emulated()
    check_cross_entropy(compute, 5, 40, FLOAT, FLOAT, spread=1e4)
    scores = np.zeros((4, 40), np.float32)
    scores[0, 1:] = -np.inf
    scores[1, 8:32] = -np.inf
    scores[2, 7] = np.nan
    labels = np.array([0, 0, 3, 39])
    loss, lse = compute("CrossEntropy", {}, [stored(labels, INT64), (scores, FLOAT)], [FLOAT, FLOAT])
    assert np.isnan(loss)
    np.testing.assert_allclose(lse[[0, 1, 3]], np.log([1, 16, 40]), rtol=1e-6, atol=1e-7)
    assert np.isnan(lse[2])
    for place in (1, 2, 3):
        scores[2] = 0
        scores[2, 13 * place] = np.nan
        scores[2, :3] = -np.inf
        assert np.isnan(compute("CrossEntropy", {}, [stored(labels, INT64), (scores, FLOAT)], [FLOAT, FLOAT])[1][2])


@needs_emulation
@pytest.mark.parametrize("label", [-1, 40, -(2**63), 2**40])
def test_a_label_out_of_range_gives_nan(label: int) -> None:
    compute, scores = Emulated(), stored(np.zeros((3, 40)), FP16)
    labels = stored(np.array([1, label, 2]), INT64)
    loss, lse = compute("CrossEntropy", {"ignore": -100}, [labels, scores], [FLOAT, FLOAT])
    assert np.isnan(loss)
    given = [labels, (np.array(1, np.float32), FLOAT), scores, (lse, FLOAT)]
    (dscores,) = compute("CrossEntropyGrad", {"ignore": -100}, given, [FP16])
    both = compute("CrossEntropyWithGrad", {"ignore": -100}, given[:3], [FLOAT, FP16])
    assert np.isnan(both[0])
    for each in (dscores, both[1]):
        assert np.isnan(each[1]).all()
        assert np.isfinite(each[[0, 2]]).all()


@needs_emulation
@pytest.mark.parametrize("dims", [(3, 1), (500, 12), (300, 64), (90, 768), (2, 35, 257)], ids=str)
def test_column_sums(dims: tuple[int, ...]) -> None:
    for kind in KINDS if dims == (90, 768) else [FP16]:
        check_column_sums(Emulated(), dims, kind)


@needs_emulation
def test_sums_over_leading_axes() -> None:
    for axes in (1, 2):
        check_column_sums(Emulated(), (6, 5, 4, 9), FP16, axes)


@needs_emulation
@pytest.mark.parametrize(
    ("rows", "dims", "width", "skew"),
    [
        (5, (7,), 3, 1),
        (300, (3, 50), 64, 3),
        (1100, (2500,), 8, 1),
        (2, (1200,), 24, 1),
        (1, (40,), 1, 1),
        (9, (1, 1), 1030, 1),
    ],
)
def test_gradients_of_tables(rows: int, dims: tuple[int, ...], width: int, skew: float) -> None:
    check_table_gradient(Emulated(), rows, dims, width, FP16, FLOAT, skew=skew)
    if width == 64:
        check_table_gradient(Emulated(), rows, dims, width, BF16, BF16, skew=skew)


@needs_emulation
def test_gradients_of_tables_with_more_indices_than_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "CHUNKS", 2)
    check_table_gradient(Emulated(), 1500, (3000,), 4, FP16, FP16, skew=4)


@needs_emulation
@pytest.mark.parametrize("index", [9, -10, 2**40])
def test_an_index_out_of_range_gives_nan(index: int) -> None:
    given = [stored(np.array([1, index, 2]), INT64), stored(np.zeros((3, 8)), FP16)]
    (table,) = Emulated()("TableGrad", {"rows": 9}, given, [FLOAT])
    assert np.isnan(table).all()


@needs_emulation
@pytest.mark.parametrize(
    ("dims", "mask", "kinds"),
    [
        ((2, 3, 5, 40), (5, 40), (FP16, FLOAT, FP16, FP16)), ((2, 3, 5, 37), (2, 1, 1, 37), (BF16, BF16, FLOAT, FLOAT)),
        ((3, 300), (3, 1), (FLOAT,) * 4), ((3, 1), (4, 3, 9), (FLOAT,) * 4), ((2, 1032), None, (FP16,) * 4),
        ((7,), (), (FP16,) * 4), ((2, 1, 4, 8), (3, 1, 8), (FP16, FP16, BF16, FP16)),
    ],
)  # fmt: skip
def test_softmax(dims: tuple[int, ...], mask: tuple[int, ...] | None, kinds: tuple[int, int, int, int]) -> None:
    check_softmax(Emulated(), dims, mask, kinds)


@needs_emulation
def test_softmax_of_rows_that_do_not_fit_into_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = source.rows_of
    monkeypatch.setattr(softmax, "rows_of", lambda width, lanes, **_: layout(width, lanes, 8, 64))
    check_softmax(Emulated(), (2, 1048), (2, 1048), (FP16, FLOAT, FP16, FLOAT))
    check_softmax(Emulated(), (2, 1049), (1, 1), (FLOAT, FLOAT, FP16, FP16))


@needs_emulation
@pytest.mark.parametrize("kinds", [(FLOAT, FLOAT), (FP16, FP16), (BF16, FLOAT), (FLOAT, BF16)], ids=str)
@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize(
    ("dims", "table"),
    [
        ((2, 3, 5, 64), (1, 1, 5, 64)), ((2, 3, 5, 8), (2, 1, 5, 8)), ((1, 4, 1, 6), (6,)),
        ((3, 2, 7, 10), (3, 2, 7, 10)), ((2, 1, 300, 2), (300, 2)), ((0, 2, 3, 4), (1, 1, 3, 4)),
    ],
    ids=str,
)  # fmt: skip
def test_rotary_positions(
    dims: tuple[int, ...], table: tuple[int, ...], kinds: tuple[int, int], *, tokens_first: bool
) -> None:
    check_rotary(Emulated(), dims, table, kinds, tokens_first=tokens_first)


@needs_emulation
@pytest.mark.parametrize("dims", [(5, 12), (4,), (2, 3, 2, 2, 3, 8)], ids=str)
def test_rotary_positions_of_any_rank(dims: tuple[int, ...]) -> None:
    check_rotary(Emulated(), dims, dims[-2:], (FLOAT, FLOAT), tokens_first=False)


@pytest.mark.parametrize(
    ("dims", "tables", "tokens_first"),
    [
        ((2, 3, 4, 6), [(3, 6), (3, 6)], 0), ((2, 3, 4, 6), [(4, 6), (4, 6)], 1), ((2, 3, 4, 6), [(4, 6), (1, 6)], 0),
        ((2, 3, 4, 5), [(5,), (5,)], 0), ((4, 6), [(4, 6), (4, 6)], 1),
    ],
    ids=str,
)  # fmt: skip
def test_tables_that_do_not_fit_are_refused(
    dims: tuple[int, ...], tables: list[tuple[int, ...]], tokens_first: int
) -> None:
    given = [stored(np.zeros(each), FLOAT) for each in (dims, *tables)]
    with pytest.raises(OrtflowError, match=rf"value \[.*{dims[-1]}\]"):
        Emulated()("Rotary", {"tokens_first": tokens_first}, given, [FLOAT])


def test_axes_that_are_one_to_scores_and_mask_are_one() -> None:
    assert leading_axes((2, 3, 5, 40), (2, 3, 5, 40), (5, 40)) == [(6, 200, 0), (5, 40, 40)]
    assert leading_axes((2, 3, 5, 40), (2, 3, 5, 40), ()) == [(30, 40, 0)]
    assert leading_axes((2, 3, 5, 40), (2, 3, 5, 40), (2, 1, 1, 40)) == [(2, 600, 40), (15, 40, 0)]
    assert leading_axes((2, 3, 5, 40), (2, 3, 5, 40), (2, 3, 5, 1)) == [(30, 40, 1)]
    assert leading_axes((40,), (40,), ()) == []
    with pytest.raises(OrtflowError, match=r"\[2, 3\].*\[4\]"):
        spread_shape((2, 3), (4,))


@needs_emulation
@pytest.mark.parametrize(
    ("one", "other"),
    [((2, 3, 5), (1, 3, 5)), ((2, 3, 5), (2, 1, 5)), ((1, 3, 8), (4, 1, 8)), ((300, 1), (1, 1)),
     ((2, 1, 4, 9), (3, 1, 9)), ((0, 4), (1, 4))],
    ids=str,
)  # fmt: skip
def test_sums_of_values_that_are_broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    for kind in KINDS:
        given = [stored(random.normal(size=dims), kind) for dims in (one, other)]
        call = EmulatedCall(given, [kind])
        product.spread_sum(call, call.given(0), call.given(1))  # type: ignore[arg-type]
        check("the sum", call.results()[0], given[0][0] + given[1][0].astype(np.float64), kind)


def test_sums_of_values_that_do_not_match_are_refused() -> None:
    for one, other in (((2, 5), (3, 5)), ((2, 5), (2, 1)), ((2, 5), (5, 2))):
        call = EmulatedCall([stored(np.zeros(dims), FP16) for dims in (one, other)], [FP16], run=False)
        with pytest.raises(OrtflowError, match=r"a product of shape .* and a residual of shape"):
            product.spread_sum(call, call.given(0), call.given(1))  # type: ignore[arg-type]


@needs_emulation
def test_nothing_to_compute() -> None:
    compute, empty = Emulated(), stored(np.zeros((0, 8)), FP16)
    labels = stored(np.zeros(0), INT64)
    vector, column = stored(np.ones(8), FLOAT), stored(np.zeros((0, 1)), FLOAT)
    assert [array.shape for array in compute("LayerNormalization", {}, [empty, vector], [FP16, FLOAT, FLOAT])] == [
        (0, 8), (0, 1), (0, 1),
    ]  # fmt: skip
    found = compute("LayerNormalizationGrad", {}, [empty, empty, vector, column, column], [FP16, FLOAT, FLOAT])
    assert not found[1].any()
    assert not found[2].any()
    assert compute("CrossEntropy", {}, [labels, empty], [FLOAT, FLOAT])[0] == 0
    assert compute("CrossEntropyWithGrad", {}, [labels, stored(np.ones(()), FLOAT), empty], [FLOAT, FP16])[0] == 0
    assert not compute("ColumnSums", {}, [empty], [FLOAT])[0].any()
    (table,) = compute("TableGrad", {"rows": 3}, [labels, empty], [FP16])
    assert table.shape == (3, 8)
    assert not table.any()


def test_what_does_not_fit_is_refused() -> None:
    x, vector, column = stored(np.zeros((3, 8)), FP16), stored(np.ones(8), FLOAT), stored(np.zeros((3, 1)), FLOAT)
    short, labels = stored(np.ones(7), FLOAT), stored(np.zeros(4), INT64)
    for operator, inputs, types, words in (
        ("LayerNormalization", [x, short], [FP16, FLOAT, FLOAT], "the scale is [7], and rows have 8"),
        ("LayerNormalization", [x, vector, short], [FP16, FLOAT, FLOAT], "the bias is [7]"),
        ("RMSNormalizationGrad", [vector, x, vector, column], [FP16, FLOAT], "the gradient is [8]"),
        ("RMSNormalizationGrad", [x, x, vector, column, vector], [FP16, FLOAT], "the residual is [8]"),
        ("CrossEntropy", [labels, x], [FLOAT, FLOAT], "labels are [4], and scores [3, 8]"),
        ("CrossEntropyGrad", [stored(np.zeros(3), INT64), column, x, column], [FP16], "the gradient is [3, 1]"),
        ("CrossEntropyWithGrad", [stored(np.zeros(3), INT64), column, x], [FLOAT, FP16], "the gradient is [3, 1]"),
        ("TableGrad", [labels, x], [FP16], "indices are [4], and their gradient [3, 8]"),
        ("TableGrad", [stored(np.zeros(3), INT64), x, x], [FP16], "the table is [4, 8], and what is added"),
        ("LayerNormalization", [(x[0], INT64), vector], [FP16, FLOAT, FLOAT], "INT64 is not an element type"),
    ):
        with pytest.raises(OrtflowError, match=words.replace("[", r"\[")):
            OPERATORS[operator]({"rows": 4}).run(EmulatedCall(inputs, types, run=False))  # type: ignore[arg-type]


def test_every_operator_declares_which_of_its_values_may_be_half() -> None:
    assert OPERATORS.keys() >= HALF.keys()


def sources(kinds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Every source and kernel that the operators launch, for values of these types."""

    def launched(operator: str, inputs: list[Any], types: list[int], **attributes: Any) -> Iterator[tuple[str, str]]:
        call = EmulatedCall(inputs, types, run=False)
        OPERATORS[operator](attributes).run(call)  # type: ignore[arg-type]
        yield from call.launched

    for kind in kinds:
        for width in (768, 769, 4096, 33_000):
            x, vector, column = (np.zeros(dims, np.float32) for dims in ((2, width), (width,), (2, 1)))
            given, fp32 = (x, kind), [(array, FLOAT) for array in (vector, column, column)]
            yield from launched("LayerNormalization", [given, fp32[0]], [kind, FLOAT, FLOAT])
            yield from launched("LayerNormalizationGrad", [given, given, *fp32], [kind, FLOAT, FLOAT])
            yield from launched("LayerNormalizationGrad", [given, given, *fp32, given], [kind, FLOAT, FLOAT])
            with_sums = [given, given, *fp32, given], [kind, FLOAT, FLOAT, FLOAT]
            yield from launched("LayerNormalizationGrad", *with_sums, sums=1)
            yield from launched("RMSNormalizationGrad", [given, given, *fp32[:2]], [kind, FLOAT])
            yield from launched("RMSNormalizationGrad", [given, given, *fp32[:2], given], [kind, FLOAT])
            yield from launched("ColumnSums", [given], [FLOAT])
            yield from launched("PixelMeans", [(x.reshape(1, 2, 1, width), kind)], [FLOAT])
            yield from launched("Join", [given, given], [kind], axis=-1)
            labels, scalar = stored(np.zeros(2), INT64), stored(np.zeros(()), FLOAT)
            yield from launched("CrossEntropy", [labels, given], [FLOAT, FLOAT])
            yield from launched("CrossEntropyWithGrad", [labels, scalar, given], [FLOAT, kind])
            yield from launched("Softmax", [given, (vector, FLOAT)], [kind])
            yield from launched("SoftmaxGrad", [given, given], [kind])
            yield from launched("TableGrad", [labels, given], [kind], rows=50_257)
            yield from launched("TableGrad", [labels, given, given], [kind], rows=2)
            for rank in (1, 3):
                spread = EmulatedCall([], [kind], run=False)
                one, other = (Tensor(256, dims, kind) for dims in ((rank, 3, width), (1, 3, width)))
                product.spread_sum(spread, one, other)  # type: ignore[arg-type]
                yield from spread.launched
            yield from launched("CrossEntropyGrad", [labels, scalar, given, (column, FLOAT)], [kind])
        for width in (1, 6, 64, 769):
            given, vector = (np.zeros((2, width), np.float32), kind), stored(np.ones(width), FLOAT)
            yield from launched("BatchStatistics", [given, *[vector] * 4], [FLOAT] * 8)
            yield from launched("BatchGradients", [given, given, *[vector] * 3], [FLOAT] * 5)
            yield from launched("BatchGradients", [given, given, *[vector] * 5], [FLOAT] * 5)
            added = [given, given, *[vector] * 3, given, given]
            yield from launched("BatchGradientsOfSum", added, [*[FLOAT] * 5, kind])
        of_image, of_pool = (np.zeros((1, size, size, 8), np.float32) for size in (4, 2))
        for operator in ("Rotary", "RotaryGrad"):
            for width in (64, 6):
                table = stored(np.zeros((5, width)), FLOAT)
                yield from launched(operator, [stored(np.zeros((2, 3, 5, width)), kind), table, table], [kind])
        windows = {"kernel_shape": (2, 2), "strides": (2, 2)}
        yield from launched("MaxPool", [(of_image, kind)], [kind, UINT8], **windows)
        yield from launched("MaxPoolGrad", [(of_pool, kind), (of_pool, UINT8)], [kind], **windows, sizes=[4, 4])
        if kind != FLOAT:
            for function in ("channels_first", "out_of_blocks"):
                yield source.source("convolution", (("X", kind),)), function
        for stored_as in {FLOAT, kind}:
            for more in ({}, {"block": (2, 3), "before": (3, 1), "sizes": (4, 2)}):
                yield from launched("ChannelsLast", [(of_image.transpose(0, 3, 1, 2), stored_as)], [kind], **more)
    yield source.source("memsets", ()), "set_bytes"
    for ranks in (2, 8):
        numbers = ("RANKS", ranks), ("RANK", ranks - 1), ("VECTOR", 4)
        for function in ("next_step", "notify", "wait_for", "add_up"):
            yield source.source("peers", (), numbers), function


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_120"])
def test_nvrtc_compiles_every_source(architecture: str) -> None:
    library = _nvrtc()
    wanted: dict[str, set[str]] = {}
    for text, function in sources((FP16,) if architecture != "sm_90" else KINDS):
        wanted.setdefault(text, set()).add(function)
    for text, functions in wanted.items():
        code = nvrtc.compiled(library, text, architecture)
        assert all(function.encode() in code for function in functions)


def _nvrtc() -> Any:
    nvidia = pytest.importorskip("nvidia", reason="needs nvidia-cuda-nvrtc")
    from pathlib import Path

    found = [path for folder in nvidia.__path__ for path in Path(folder).glob("cu13/lib/libnvrtc.so.*")]
    if not found:
        pytest.skip("needs nvidia-cuda-nvrtc for CUDA 13")
    return ctypes.CDLL(str(found[0]))


@needs_emulation
@pytest.mark.parametrize(
    ("dims", "of_x", "of_dy"),
    [((2, 3, 5, 64), BF16, BF16), ((300, 24), FP16, FLOAT), ((7, 5), FLOAT, FP16), ((1, 8), BF16, BF16),
     ((40, 3, 300), FLOAT, FLOAT), ((3, 769), BF16, FP16)],
    ids=str,
)  # fmt: skip
def test_batch_norms(dims: tuple[int, ...], of_x: int, of_dy: int) -> None:
    check_batch_norm(Emulated(), dims, of_x, of_dy)


@needs_emulation
@pytest.mark.parametrize("dims", [(2, 3, 7, 9), (1, 1, 1, 1), (3, 8, 5, 4), (64, 3, 7, 7), (0, 3, 4, 4)], ids=str)
@pytest.mark.parametrize(("of_x", "of_y"), [(FLOAT, BF16), (BF16, BF16), (FP16, FP16), (FLOAT, FLOAT)], ids=str)
def test_images_of_few_channels_are_padded(dims: tuple[int, ...], of_x: int, of_y: int) -> None:
    check_channels_last(Emulated(), dims, of_x, of_y)


@needs_emulation
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(2, 7, 7, 40), (3, 1, 1, 9), (1, 30, 20, 64), (2, 5, 3, 520), (0, 3, 3, 8)], ids=str)
def test_means_over_pixels(dims: tuple[int, ...], kind: int) -> None:
    check_pixel_means(Emulated(), dims, kind)


@needs_emulation
@pytest.mark.parametrize(("kind", "dims", "channels"), [
    (BF16, (5, 9, 8), 3), (FP16, (40, 1, 24), 24), (BF16, (33, 6, 7), 7), (FLOAT, (2, 49, 8), 1),
])  # fmt: skip
def test_the_gradient_of_a_weight_gets_channels_first(kind: int, dims: tuple[int, int, int], channels: int) -> None:
    outputs, places, width = dims
    values, _ = stored(np.random.default_rng(0).normal(size=dims), kind)
    call = EmulatedCall([(values, kind)], [FLOAT])
    made = call.output(0, (outputs, channels, places))
    count = outputs * channels
    call.launch(
        source.source("convolution", (("X", kind),)), "channels_first", -(-count // 256), 256,
        ctypes.c_void_p(call.given(0).pointer), ctypes.c_void_p(made), ctypes.c_int64(count),
        *map(ctypes.c_int, (places, width, channels)),
    )  # fmt: skip
    np.testing.assert_array_equal(call.results()[0], values[:, :, :channels].transpose(0, 2, 1))


@needs_emulation
@pytest.mark.parametrize(
    ("dims", "of_x", "of_dy"),
    [((2600, 64), BF16, BF16), ((300, 130), FP16, FLOAT), ((700, 3), FLOAT, BF16), ((600, 1), FP16, FP16),
     ((90, 100), BF16, FP16)],
    ids=str,
)  # fmt: skip
def test_batch_norms_of_many_chunks(
    dims: tuple[int, ...], of_x: int, of_dy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated blocks take turns from the first to the last, and the second time from the last to the first."""
    monkeypatch.setattr(batch_norm, "ROWS_A_THREAD", 1)
    check_batch_norm(Emulated(), dims, of_x, of_dy)


@needs_emulation
def test_batch_norms_of_few_blocks_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "BLOCKS", 6)
    check_batch_norm(Emulated(), (1900, 72), BF16, FLOAT)


@pytest.mark.parametrize(
    ("rows", "width", "grid"),
    [(128 * 112 * 112, 64, (1, 264)), (128 * 56 * 56, 256, (4, 132)), (128 * 7 * 7, 2048, (32, 16)), (6, 64, (1, 1)),
     (10**7, 24, (1, 528)), (50, 40_000, (625, 1))],
)  # fmt: skip
def test_blocks_of_batch_norms(rows: int, width: int, grid: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a GPU holds at a time, and no more chunks than one block adds up quickly."""
    call, found = EmulatedCall([], [FLOAT] * 6, run=False), []
    call.inputs = [Tensor(256, (rows, width), BF16), *[Tensor(256, (width,), FLOAT)] * 2]
    monkeypatch.setattr(call, "launch", lambda source, function, grid, *_: found.append((function, grid)))
    OPERATORS["BatchStatistics"]({}).run(call)  # type: ignore[arg-type]
    assert found == [("batch_statistics", grid)]


@needs_emulation
def test_a_batch_norm_far_from_zero_keeps_its_variance() -> None:
    check_batch_norm(Emulated(), (500, 16), FLOAT, FLOAT, mean=300)


@needs_emulation
@pytest.mark.parametrize(
    ("dims", "kernel", "strides", "pads", "dilations", "kinds"),
    [((2, 8, 8, 16), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (BF16, BF16, BF16)),
     ((1, 7, 9, 6), (3, 2), (1, 2), (1, 0, 1, 1), (1, 1), (FP16, FLOAT, FP16)),
     ((2, 9, 9, 3), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (FLOAT, FLOAT, FLOAT)),
     ((1, 11, 10, 8), (3, 3), (2, 3), (2, 2, 2, 2), (2, 2), (FLOAT, BF16, FLOAT))],
    ids=str,
)  # fmt: skip
def test_max_pooling(
    dims: tuple[int, ...], kernel: tuple[int, int], strides: tuple[int, int], pads: tuple[int, ...],
    dilations: tuple[int, int], kinds: tuple[int, int, int],
) -> None:  # fmt: skip
    check_max_pool(Emulated(), dims, kernel, strides, pads, kinds, dilations=dilations)
