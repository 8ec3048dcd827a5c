"""Our operators against double precision, and inputs that they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Array, compute, needs_kernels, normal, off, view

from ortflow.workflow.onnx_runtime import native

pytestmark = needs_kernels
PLAIN = {"turn_a": 0, "turn_b": 0, "view_a": 0, "view_b": 0, "view_y": 0, "alpha": 1.0}
HEAVY = {"momentum": 0.9, "nesterov": 0}
SIZES = st.sampled_from([1, 2, 5, 6, 7, 8, 13, 16, 17, 31, 33, 48, 73, 130, 257])
BATCHES = st.sampled_from([((), ()), ((3,), ()), ((2, 3), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (2, 1)), ((), (4,))])
erf = np.vectorize(math.erf, otypes="d")


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, SIZES, BATCHES, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([1.0, 0.5]))
def test_products_of_all_shapes(
    m: int, n: int, k: int, batch: tuple[tuple[int, ...], ...], turn_a: bool, turn_b: bool, biased: bool, alpha: float
) -> None:
    a, b, bias = normal(1, *batch[0], m, k), normal(2, *batch[1], k, n), normal(3, n)
    expected = alpha * (a.astype("d") @ b.astype("d")) + (bias if biased else 0)
    given_a = np.ascontiguousarray(a.swapaxes(-1, -2)) if turn_a else a
    given_b = np.ascontiguousarray(b.swapaxes(-1, -2)) if turn_b else b
    flags = PLAIN | {"turn_a": int(turn_a), "turn_b": int(turn_b), "alpha": alpha}
    (y,) = compute("Product", given_a, given_b, *([bias] if biased else []), **flags)
    assert off(y, expected) < 2e-6


@pytest.mark.rotates
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (300, 1100, 700),
        (1100, 300, 700),
        (512, 512, 1030),
        (5000, 3, 9),
        (150, 700, 2100),
        (700, 150, 2100),
        (2, 5000, 40),
        (160, 170, 46000),
    ],
)
@pytest.mark.parametrize("turns", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_products_larger_than_every_block_do_not_depend_on_the_threads(
    m: int, n: int, k: int, turns: tuple[int, int]
) -> None:
    a, b = normal(4, *((k, m) if turns[0] else (m, k))), normal(5, *((n, k) if turns[1] else (k, n)))
    bias = normal(6, n)
    flags = PLAIN | {"turn_a": turns[0], "turn_b": turns[1]}
    one, two = (compute("Product", a, b, bias, threads=threads, **flags)[0] for threads in (1, 2))
    expected = (a.T if turns[0] else a).astype("d") @ (b.T if turns[1] else b).astype("d") + bias
    assert off(one, expected) < 2e-6
    assert np.array_equal(one, two)


@pytest.mark.parametrize("seen_a", [None, (0, 2, 1, 3), (0, 2, 3, 1)])
@pytest.mark.parametrize("seen_b", [None, (0, 2, 1, 3), (0, 2, 3, 1)])
@pytest.mark.parametrize("seen_y", [None, (0, 2, 1, 3), (0, 3, 1, 2), (0, 1, 3, 2)])
def test_products_see_through_transposes(
    seen_a: tuple[int, ...] | None, seen_b: tuple[int, ...] | None, seen_y: tuple[int, ...] | None
) -> None:
    a, b = normal(7, 2, 3, 20, 35), normal(8, 2, 3, 35, 40)
    expected = a.astype("d") @ b.astype("d")
    flags = dict(PLAIN)
    for name, order in (("view_a", seen_a), ("view_b", seen_b), ("view_y", seen_y)):
        flags[name] = view(order) if order else 0
    lies_a = np.ascontiguousarray(a.transpose(np.argsort(seen_a))) if seen_a else a
    lies_b = np.ascontiguousarray(b.transpose(np.argsort(seen_b))) if seen_b else b
    (y,) = compute("Product", lies_a, lies_b, **flags)
    assert off(y, expected.transpose(seen_y) if seen_y else expected) < 2e-6


def test_products_of_nothing() -> None:
    assert compute("Product", normal(1, 0, 4), normal(2, 4, 3), **PLAIN)[0].shape == (0, 3)
    bias = normal(3, 3)
    (y,) = compute("Product", normal(1, 2, 0), normal(2, 0, 3), bias, **PLAIN)
    assert np.array_equal(y, np.stack([bias, bias]))


def test_nan_stays_nan() -> None:
    a = normal(1, 9, 20)
    a[4, 3] = np.nan
    (y,) = compute("Product", a, normal(2, 20, 18), **PLAIN)
    assert np.isnan(y[4]).all()
    assert np.isfinite(np.delete(y, 4, axis=0)).all()
    x = np.array([np.nan, 1.0], np.float32)
    for operator in ("Gelu", "GeluGrad"):
        for approximate in (0, 1):
            gradient = [np.ones_like(x)] if operator == "GeluGrad" else []
            (y,) = compute(operator, *gradient, x, approximate=approximate)
            assert np.isnan(y).tolist() == [True, False]
    (y,) = compute("Softmax", np.array([[1, np.nan, 2], [1, 2, 3]], np.float32), scale=1.0)
    assert np.isnan(y).tolist() == [[True] * 3, [False] * 3]


@pytest.mark.parametrize("width", [1, 3, 8, 100, 257])
@pytest.mark.parametrize("biased", [True, False])
def test_layer_normalization_and_its_gradient(width: int, biased: bool) -> None:
    x, dy, scale, bias = normal(1, 37, 5, width), normal(2, 37, 5, width), normal(3, width), normal(4, width)
    inputs = [x, scale, *([bias] if biased else [])]
    y, mean, inverse = compute("LayerNormalization", *inputs, outputs=3, epsilon=1e-5)
    exact = x.astype("d")
    average = exact.mean(-1, keepdims=True)
    share = 1 / np.sqrt(exact.var(-1, keepdims=True) + 1e-5)
    normalised = (exact - average) * share
    assert off(y, normalised * scale + (bias if biased else 0)) < 1e-5
    assert off(mean, average) < 1e-6
    assert off(inverse, share) < 1e-5
    dx, dscale, dbias = compute("LayerNormalizationGrad", dy, x, scale, mean, inverse, outputs=3)
    g = dy.astype("d") * scale
    across, along = g.mean(-1, keepdims=True), (g * normalised).mean(-1, keepdims=True)
    if width > 1:
        assert off(dx, (g - across - normalised * along) * share) < 1e-5
        assert off(dscale, (dy * normalised).sum((0, 1))) < 1e-5
    assert off(dbias, dy.astype("d").sum((0, 1))) < 1e-5


@pytest.mark.parametrize("approximate", [0, 1])
def test_gelu_and_its_gradient(approximate: int) -> None:
    x = np.concatenate([np.linspace(-12, 12, 100003), [0, 1e30, -1e30]]).astype(np.float32)
    exact = x[:-2].astype("d")
    slope = math.sqrt(2 / math.pi)
    if approximate:
        below = 1 / (1 + np.exp(-2 * slope * (exact + 0.044715 * exact**3)))
        rise = exact * below * (1 - below) * 2 * slope * (1 + 3 * 0.044715 * exact**2)
    else:
        below = 0.5 * (1 + erf(exact / math.sqrt(2)))
        rise = exact * np.exp(-exact * exact / 2) / math.sqrt(2 * math.pi)
    (y,) = compute("Gelu", x, approximate=approximate)
    (dx,) = compute("GeluGrad", np.full_like(x, 2), x, approximate=approximate)
    assert np.abs(y[:-2] - exact * below).max() < 1e-6
    assert np.abs(dx[:-2] - 2 * (below + rise)).max() < 5e-6
    assert y[-2] == np.float32(1e30)
    assert abs(y[-1]) < 1e-6
    assert dx[-2:].tolist() == pytest.approx([2, 0], abs=1e-6)


@pytest.mark.parametrize("mask", [None, (50,), (1,), (50, 50), (6, 1, 1, 50), (6, 1, 50, 1), (1, 3, 50, 50)])
def test_softmax_of_masked_scores_and_its_gradient(mask: tuple[int, ...] | None) -> None:
    x, dy = normal(1, 6, 3, 50, 50), normal(2, 6, 3, 50, 50)
    added = [] if mask is None else [normal(3, *mask)]
    scores = 0.25 * x.astype("d") + (added[0] if added else 0)
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    expected = grown / grown.sum(-1, keepdims=True)
    (y,) = compute("Softmax", x, *added, scale=0.25)
    assert off(y, expected) < 2e-6
    (dx,) = compute("SoftmaxGrad", dy, y, scale=0.25)
    assert off(dx, 0.25 * expected * (dy - (dy * expected).sum(-1, keepdims=True))) < 2e-6


def test_softmax_spreads_scores_over_a_larger_mask() -> None:
    x, mask = normal(1, 2, 1, 5, 7), normal(2, 3, 5, 7)
    scores = x.astype("d") + mask
    grown = np.exp(scores - scores.max(-1, keepdims=True))
    assert off(compute("Softmax", x, mask, scale=1.0)[0], grown / grown.sum(-1, keepdims=True)) < 2e-6


def test_softmax_of_a_causal_mask_is_exactly_zero_ahead() -> None:
    mask = np.triu(np.full((9, 9), -np.inf, np.float32), 1)
    (y,) = compute("Softmax", normal(1, 2, 9, 9), mask, scale=1.0)
    assert (y[:, mask < 0] == 0).all()
    assert np.allclose(y.sum(-1), 1)


@pytest.mark.parametrize("dims", [(1000, 256), (7, 3), (5, 6, 77), (1, 5), (0, 5), (3, 0), (4000, 33)])
def test_column_sums(dims: tuple[int, ...]) -> None:
    x = normal(1, *dims)
    one, two = (compute("ColumnSums", x, threads=threads)[0] for threads in (1, 2))
    assert off(one, x.astype("d").reshape(-1, dims[-1] or 1).sum(0) if dims[-1] else np.zeros(0)) < 1e-5
    assert np.array_equal(one, two)


def test_table_gradient_adds_rows_in_order() -> None:
    shape, gradient = np.array([50, 130]), normal(1, 4, 200, 130)
    indices = np.random.default_rng(2).integers(-50, 50, (4, 200))
    expected = np.zeros((50, 130))
    np.add.at(expected, indices, gradient)
    one, two = (compute("TableGrad", shape, indices, gradient, threads=threads)[0] for threads in (1, 2))
    assert off(one, expected) < 1e-6
    assert np.array_equal(one, two)


@pytest.mark.parametrize("classes", [1, 5, 256, 1003])
def test_cross_entropy_and_its_gradient(classes: int) -> None:
    scores, dloss = normal(1, 61, classes) * 5, np.array(0.5, np.float32)
    labels = np.random.default_rng(2).integers(0, classes, 61)
    labels[::7] = -100
    exact = scores.astype("d")
    logarithms = exact - exact.max(-1, keepdims=True)
    logarithms -= np.log(np.exp(logarithms).sum(-1, keepdims=True))
    counted = labels != -100
    loss, sums = compute("CrossEntropy", labels, scores, outputs=2, ignore=-100)
    assert loss == pytest.approx(-logarithms[counted, labels[counted]].sum(), rel=1e-6, abs=1e-6)
    assert off(scores - sums[:, None], logarithms) < 1e-6
    expected = 0.5 * np.exp(logarithms) * counted[:, None]
    expected[counted, labels[counted]] -= 0.5
    (dx,) = compute("CrossEntropyGrad", labels, dloss, scores, sums, ignore=-100)
    assert np.abs(dx - expected).max() < 1e-6


def adam(w: Array, g: Array, m: Array, v: Array, t: int, decay: float) -> tuple[Array, Array, Array]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    w = w * (1 - 0.01 * decay)
    return m, v, w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


@pytest.mark.parametrize("count", [1, 7, 64, 16384 * 3 + 5])
def test_adam(count: int) -> None:
    w, m, v = normal(1, count), np.zeros(count, np.float32), np.zeros(count, np.float32)
    exact = (m.astype("d"), v.astype("d"), w.astype("d"))
    for t in range(1, 6):
        g = normal(10 + t, count)
        rate, step = np.array([0.01], np.float32), np.array([t])
        flags = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "decay": 0.1}
        m, v, w = compute("Adam", step, rate, w, g, m, v, outputs=3, **flags)
        exact = adam(exact[2], g.astype("d"), exact[0], exact[1], t, 0.1)
    assert off(w, exact[2]) < 2e-6
    assert off(m, exact[0]) < 2e-6


@pytest.mark.parametrize("operator", ["Adam", "Lamb"])
def test_moments_of_another_length_are_refused(operator: str) -> None:
    flags = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8, "decay": 0.1}
    tensors = [normal(1, *dims) for dims in ((1,), (5,), (5,), (5,), (6,))]
    with pytest.raises(native.InvalidArgument, match="not as long as the parameters"):
        compute(operator, np.array([1]), *tensors, outputs=3, **flags)


@pytest.mark.parametrize(
    ("operator", "inputs", "outputs", "attributes", "expected_text"),
    [
        ("Product", [(2, 3), (4, 5)], 1, PLAIN, "inner dimensions differ"),
        ("Product", [(2, 3, 4), (5, 4, 2)], 1, PLAIN, "batch dimensions differ"),
        ("Product", [(3,), (3, 2)], 1, PLAIN, "do not fit its view"),
        ("Product", [(2, 3), (3, 2)], 1, PLAIN | {"view_a": 10213}, "do not fit its view"),
        ("Product", [(2, 3), (3, 2)], 1, PLAIN | {"view_b": 111}, "do not fit its view"),
        ("Product", [(2, 3), (3, 2)], 1, PLAIN | {"view_y": 10}, "do not fit its view"),
        ("Product", [(2, 3), (3, 2)], 1, PLAIN | {"view_y": -101}, "do not fit its view"),
        ("Product", [(2, 3, 4), (2, 4, 3)], 1, PLAIN | {"view_y": 1120}, "last axis is neither rows nor columns"),
        ("Product", [(2, 3), (3, 4), (3,)], 1, PLAIN, "the bias does not fit"),
        ("LayerNormalization", [(2, 3), (4,)], 3, {"epsilon": 1e-5}, "not as long as the last axis"),
        ("LayerNormalizationGrad", [(2, 4), (2, 3), (3,), (2, 1), (2, 1)], 3, {}, "does not fit"),
        ("RMSNormalization", [(2, 3), (4,)], 2, {"epsilon": 1e-5}, "not as long as the last axis"),
        ("RMSNormalizationGrad", [(2, 4), (2, 4), (4,), (3, 1)], 2, {}, "does not fit"),
        (
            "GroupNormalization",
            [(2, 6, 3), (6,), (5,)],
            3,
            {"epsilon": 1e-5, "num_groups": 2},
            "groups of their channels",
        ),
        (
            "GroupNormalization",
            [(2, 6, 3), (6,), (6,)],
            3,
            {"epsilon": 1e-5, "num_groups": 4},
            "groups of their channels",
        ),
        ("GroupNormalizationGrad", [(2, 6, 3), (2, 6, 3), (6,), (2, 3, 1), (2, 2, 1)], 3, {"num_groups": 3}, "not fit"),
        ("GeluGrad", [(2, 4), (2, 3)], 1, {"approximate": 0}, "not as large"),
        ("SoftmaxGrad", [(2, 4), (2, 3)], 1, {"scale": 1.0}, "not as large"),
        ("Softmax", [(2, 4), (3,)], 1, {"scale": 1.0}, "do not fit each other"),
        ("Rotary", [(2, 3, 4, 6), (3, 6), (3, 6)], 1, {"tokens_first": 0}, "do not fit the rotated value"),
        ("Rotary", [(2, 3, 4, 6), (4, 6), (4, 6)], 1, {"tokens_first": 1}, "do not fit the rotated value"),
        ("Rotary", [(2, 3, 4, 6), (4, 6), (1, 6)], 1, {"tokens_first": 0}, "do not fit the rotated value"),
        ("RotaryGrad", [(2, 3, 4, 6), (4, 1), (4, 1)], 1, {"tokens_first": 0}, "do not fit the rotated value"),
        ("Rotary", [(2, 3, 4, 5), (4, 5), (4, 5)], 1, {"tokens_first": 0}, "no halves"),
        ("RotaryGrad", [(4, 6), (4, 6), (4, 6)], 1, {"tokens_first": 1}, "no heads"),
        ("Gelu", [(1,) * 9], 1, {"approximate": 0}, "more than 8 axes"),
        ("Sgd", [(1,), (5,), (6,)], 1, {"decay": 0.0}, "not as long as the parameters"),
        ("SgdMomentum", [(1,), (5,), (5,), (6,)], 2, {"decay": 0.0, **HEAVY}, "not as long as the parameters"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_a_sentence(
    operator: str, inputs: list[tuple[int, ...]], outputs: int, attributes: dict[str, float], expected_text: str
) -> None:
    with pytest.raises(native.InvalidArgument, match=expected_text):
        compute(operator, *(normal(1, *dims) for dims in inputs), outputs=outputs, **attributes)


def test_a_transposed_convolution_of_one_place_adds_the_bias() -> None:
    x, weight, bias = normal(1, 3, 20, 1, 1), normal(2, 20, 7, 4, 2), normal(3, 7)
    geometry, shape = np.array([1, 4, 2, 3, 2, 0, 0, 1, 1]), np.array([3, 7, 4, 2])
    expected = np.einsum("ncxy,cmhw->nmhw", x.astype("d"), weight) + bias[:, None, None]
    assert off(compute("ConvDataGrad", geometry, shape, x, weight, bias)[0], expected) < 1e-6


def test_labels_and_indices_outside_are_refused() -> None:
    with pytest.raises(native.InvalidArgument, match="label"):
        compute("CrossEntropy", np.array([0, 5]), normal(1, 2, 5), outputs=2, ignore=-100)
    with pytest.raises(native.InvalidArgument, match="an index lies outside of the table"):
        compute("TableGrad", np.array([5, 2]), np.array([5]), normal(1, 1, 2))
