"""References for the operators of `ortflow.cuda`, in double precision, for any way of running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from emulated_cuda import from_bytes, to_bytes
from onnx import TensorProto

from ortflow.workflow.cuda import blocks

Array = npt.NDArray[Any]
Given = tuple[Array, int]
Compute = Callable[[str, dict[str, Any], Sequence[Given | None], Sequence[int]], list[Array]]
"""(operator, attributes, inputs with their element types, element types of the outputs) -> the outputs as fp32."""

FLOAT, FP16, BF16, INT64, UINT8 = (
    int(kind)
    for kind in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.UINT8)
)
KINDS = (FLOAT, FP16, BF16)
NAMES = {FLOAT: "fp32", FP16: "fp16", BF16: "bf16"}
ROUNDING = {FLOAT: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}
_SMALLEST = {FLOAT: 1e-38, FP16: 2.0**-25, BF16: 1e-38}


def stored(array: Array, kind: int) -> Given:
    """An array rounded to the element type, and the type."""
    if kind == INT64:
        return array.astype(np.int64), kind
    return from_bytes(to_bytes(array, kind), kind, array.shape), kind


def check(name: str, found: Array, reference: Array, kind: int, tolerance: float = 3e-6, least: float = 0) -> None:
    """Check up to the rounding of the element type and `tolerance` of the largest value, or of `least`."""
    assert found.shape == reference.shape, (name, found.shape, reference.shape)
    if not reference.size:
        return
    largest = max(float(np.abs(reference).max()), least)
    bound = 1.05 * ROUNDING[kind] * np.abs(reference) + tolerance * largest + _SMALLEST[kind]
    off = np.abs(found.astype(np.float64) - reference)
    wrong = ~(off <= bound)
    where = np.unravel_index(int(np.argmax(np.where(np.isnan(off), np.inf, off / bound))), off.shape)
    assert not wrong.any(), (
        f"{name} {NAMES[kind]} {reference.shape}: {wrong.mean():.2%} wrong, the worst at {tuple(map(int, where))}:"
        f" {found[where]} for {reference[where]}, the largest is {largest}"
    )


def twice(
    compute: Compute, operator: str, attributes: dict[str, Any], inputs: Any, types: Sequence[int]
) -> list[Array]:
    """The outputs; checks that they have the same bits each time."""
    first, second = (compute(operator, attributes, inputs, types) for _ in range(2))
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        np.testing.assert_array_equal(one, other, err_msg=f"{operator}: output {place} has other bits the second time")
    return first


def check_norms(
    compute: Compute,
    dims: tuple[int, ...],
    kinds: tuple[int, int, int, int],
    *,
    rms: bool,
    bias: bool = True,
    residual: int | None = None,
) -> None:
    """Forward and backward; `kinds` of x, y, dy and dx, and `residual` that of what is added to dx, if anything is."""
    random, width, epsilon = np.random.default_rng(sum(dims)), dims[-1], 1e-5
    of_x, of_y, of_dy, of_dx = kinds
    x, dy = stored(random.normal(0.5, 2, dims), of_x), stored(random.normal(0, 1, dims), of_dy)
    scale, shift = (stored(random.normal(mean, 0.5, width), FLOAT) for mean in (1, 0))
    name = f"{'RMS' if rms else 'Layer'}Normalization"
    exact = x[0].astype(np.float64)
    mean = np.zeros((*dims[:-1], 1)) if rms else exact.mean(-1, keepdims=True)
    inverse = 1 / np.sqrt(((exact - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    normal = (exact - mean) * inverse
    with_bias = bias and not rms
    inputs = [x, scale, *([shift] if with_bias else [])]
    found = twice(compute, name, {"epsilon": epsilon}, inputs, [of_y, FLOAT] if rms else [of_y, FLOAT, FLOAT])
    check(f"{name} y", found[0], normal * scale[0] + (shift[0] if with_bias else 0), of_y)
    check(f"{name} 1 / deviation", found[-1], inverse, FLOAT)
    if not rms:
        check(f"{name} mean", found[1], mean, FLOAT, 1e-6)
    statistics = [stored(value, FLOAT) for value in ([inverse] if rms else [mean, inverse])]
    past = stored(random.normal(0, 1, dims), residual) if residual is not None else None
    inputs = [dy, x, scale, *statistics, *([past] if past else [])]
    outputs = [of_dx, FLOAT] if rms else [of_dx, FLOAT, FLOAT]
    found = twice(compute, f"{name}Grad", {}, inputs, outputs)
    summed = twice(compute, f"{name}Grad", {"sums": 1}, inputs, [*outputs, FLOAT])
    for one, other in zip(summed, found, strict=False):
        np.testing.assert_array_equal(one, other, err_msg=f"{name}Grad has other bits with sums")
    g = dy[0].astype(np.float64) * scale[0]
    dx = g - normal * (g * normal).mean(-1, keepdims=True) - (0 if rms else g.mean(-1, keepdims=True))
    axes = tuple(range(len(dims) - 1))
    dx = dx * inverse + (past[0] if past else 0)
    check(f"{name}Grad dx", found[0], dx, of_dx, 1e-5, float(np.abs(g * inverse).max()))
    tolerance = 3e-6 * max(1.0, np.prod(dims[:-1]) ** 0.5 / 10)
    # The sums cancel: their addends say how exact they can be. Long rows are summed as they are stored.
    addends = float((np.abs(g * inverse) + (np.abs(past[0]) if past else 0)).sum(axes).max(initial=0))
    check(f"{name}Grad sums", summed[-1], dx.sum(axes), FLOAT, max(3e-6, ROUNDING[of_dx]), addends)
    check(f"{name}Grad dscale", found[1], (dy[0] * normal).sum(axes), FLOAT, tolerance)
    if not rms:
        check(f"{name}Grad dbias", found[2], dy[0].astype(np.float64).sum(axes), FLOAT, tolerance)


def check_cross_entropy(
    compute: Compute, rows: int, classes: int, of_scores: int, of_gradient: int, *, spread: float = 4
) -> None:
    """Sum, logarithms and gradient, with some rows ignored."""
    random, ignore = np.random.default_rng(rows + classes), -100
    scores = stored(random.normal(0, spread, (rows, classes)), of_scores)
    labels = random.integers(0, classes, rows)
    labels[random.random(rows) < 0.2] = ignore
    exact, counts = scores[0].astype(np.float64), labels != ignore
    most = exact.max(-1, keepdims=True)
    lse = (np.log(np.exp(exact - most).sum(-1, keepdims=True)) + most)[:, 0]
    places = np.where(counts, labels, 0)
    loss = np.where(counts, lse - exact[np.arange(rows), places], 0).sum()
    given = [stored(labels, INT64), scores]
    found = twice(compute, "CrossEntropy", {"ignore": ignore}, given, [FLOAT, FLOAT])
    check("CrossEntropy sum", found[0], np.asarray(loss), FLOAT, 5e-6)
    check("CrossEntropy logarithms", found[1], lse, FLOAT)
    gradient = np.array(8, np.float32)
    expected = np.exp(exact - lse[:, None])
    expected[np.arange(rows), places] -= 1
    expected *= np.where(counts, 8.0, 0.0)[:, None]
    given = [stored(labels, INT64), (gradient, FLOAT), scores, stored(lse, FLOAT)]
    (dscores,) = twice(compute, "CrossEntropyGrad", {"ignore": ignore}, given, [of_gradient])
    check("CrossEntropyGrad", dscores, expected, of_gradient, 5e-6)
    assert not dscores[~counts].any()
    given = [stored(labels, INT64), (gradient, FLOAT), scores]
    both = twice(compute, "CrossEntropyWithGrad", {"ignore": ignore}, given, [FLOAT, of_gradient])
    check("CrossEntropyWithGrad sum", both[0], np.asarray(loss), FLOAT, 5e-6)
    check("CrossEntropyWithGrad", both[1], expected, of_gradient, 5e-6)
    assert not both[1][~counts].any()


def check_column_sums(compute: Compute, dims: tuple[int, ...], kind: int, axes: int | None = None) -> None:
    """The sum over all but the last axis, or over the first `axes`."""
    x = stored(np.random.default_rng(sum(dims)).normal(0.1, 1, dims), kind)
    attributes = {} if axes is None else {"axes": axes}
    (found,) = twice(compute, "ColumnSums", attributes, [x], [FLOAT])
    over = tuple(range(len(dims) - 1 if axes is None else axes))
    rows = np.prod([dims[axis] for axis in over])
    check("ColumnSums", found, x[0].astype(np.float64).sum(over), FLOAT, 1e-6 * max(1.0, rows**0.5 / 10))


def check_table_gradient(
    compute: Compute, rows: int, dims: tuple[int, ...], width: int, of_gradient: int, of_table: int, *, skew: float = 1
) -> None:
    """`skew`: how much more frequent low indices are; 1 for all alike."""
    random = np.random.default_rng(rows + sum(dims) + width)
    indices = np.minimum((random.random(dims) ** skew * rows).astype(np.int64), rows - 1)
    from_end = random.random(dims) < 0.1
    gradient = stored(random.normal(0, 1, (*dims, width)), of_gradient)
    expected, sizes = np.zeros((rows, width)), np.zeros(rows)
    np.add.at(expected, indices.reshape(-1), gradient[0].reshape(-1, width).astype(np.float64))
    np.add.at(sizes, indices.reshape(-1), 1)
    given = [stored(np.where(from_end, indices - rows, indices), INT64), gradient]
    (found,) = twice(compute, "TableGrad", {"rows": rows}, given, [of_table])
    tolerance = 1e-6 * max(1.0, sizes.max() ** 0.5 / 10)
    check("TableGrad", found, expected, of_table, tolerance)
    assert not found[sizes == 0].any()
    added = stored(random.normal(0, 1, (rows, width)), of_gradient)
    (found,) = twice(compute, "TableGrad", {"rows": rows}, [*given, added], [of_table])
    check("TableGrad with an addend", found, expected + added[0], of_table, tolerance)


def check_softmax(
    compute: Compute, dims: tuple[int, ...], mask: tuple[int, ...] | None, kinds: tuple[int, int, int, int]
) -> None:
    """Forward with a scale and a mask, and backward; `kinds` of x, mask, y and the gradients."""
    random, scale = np.random.default_rng(sum(dims)), 0.3
    of_x, of_mask, of_y, of_gradient = kinds
    x = stored(random.normal(0, 4, dims), of_x)
    given, exact = [x], x[0].astype(np.float64) * np.float32(scale)
    if mask is not None:
        hidden = np.where(random.random(mask) < 0.3, -60.0, random.normal(0, 1, mask))
        given.append(stored(hidden, of_mask))
        exact = exact + given[1][0]
    powers = np.exp(exact - exact.max(-1, keepdims=True))
    expected = powers / powers.sum(-1, keepdims=True)
    (y,) = twice(compute, "Softmax", {"scale": scale}, given, [of_y])
    check("Softmax", y, expected, of_y, 5e-6)
    dy, rounded = stored(random.normal(0, 1, expected.shape), of_gradient), stored(expected, of_y)
    (dx,) = twice(compute, "SoftmaxGrad", {"scale": scale}, [dy, rounded], [of_gradient])
    g, p = dy[0].astype(np.float64), rounded[0].astype(np.float64)
    check("SoftmaxGrad", dx, (g - (g * p).sum(-1, keepdims=True)) * p * np.float32(scale), of_gradient, 5e-6)


def rotated(x: Array, cosine: Array, sine: Array, *, backward: bool = False) -> Array:
    """Rotary positions of x, or their gradient for a gradient x, in double precision."""
    x, cosine, sine = (one.astype(np.float64) for one in (x, cosine, sine))
    if backward:
        a, b = np.split(x * sine, 2, -1)
        return np.asarray(x * cosine + np.concatenate([b, -a], -1))
    a, b = np.split(x, 2, -1)
    return np.asarray(x * cosine + np.concatenate([-b, a], -1) * sine)


def check_rotary(
    compute: Compute, dims: tuple[int, ...], table: tuple[int, ...], kinds: tuple[int, int], *, tokens_first: bool
) -> None:
    """Forward and backward, for a value with heads first of these dims; `kinds` of the input and the output."""
    random = np.random.default_rng(sum(dims))
    tables = [stored(random.normal(0, 1, table), FLOAT) for _ in range(2)]
    arrays = [one for one, _ in tables]
    for operator, backward in (("Rotary", False), ("RotaryGrad", True)):
        x, kind = stored(random.normal(0, 1, dims), kinds[0])
        expected = rotated(x, *arrays, backward=backward)
        if tokens_first and backward:
            expected = expected.swapaxes(1, 2)
        elif tokens_first:
            x = np.ascontiguousarray(x.swapaxes(1, 2))
        given = [(x, kind), *tables]
        (y,) = twice(compute, operator, {"tokens_first": int(tokens_first)}, given, [kinds[1]])
        check(operator, y, expected, kinds[1], 1e-6)


def check_batch_norm(compute: Compute, dims: tuple[int, ...], of_x: int, of_dy: int, *, mean: float = 0.5) -> None:
    """The factors of y and dx for images of these dims, channels last."""
    random, width, epsilon = np.random.default_rng(sum(dims)), dims[-1], 1e-5
    x, dy = stored(random.normal(mean, 2, dims), of_x), stored(random.normal(0.1, 1, dims), of_dy)
    scale, bias = (stored(random.normal(middle, 0.5, width), FLOAT) for middle in (1, 0))
    exact, axes = x[0].astype(np.float64), tuple(range(len(dims) - 1))
    average, variance = exact.mean(axes), exact.var(axes)
    inverse = 1 / np.sqrt(variance + np.float32(epsilon))
    given = [x, scale, bias]
    without = twice(compute, "BatchStatistics", {"epsilon": epsilon}, given, [FLOAT] * 6)
    old, kept, fresh = stored(random.normal(0, 1, (2, width)), FLOAT)[0], np.float32(0.7), np.float32(0.3)
    settings = {"epsilon": epsilon, "momentum": float(kept), "fresh": float(fresh)}
    found = twice(compute, "BatchStatistics", settings, [*given, *((each, FLOAT) for each in old)], [FLOAT] * 8)
    for one, other in zip(without, found, strict=False):
        np.testing.assert_array_equal(one, other, err_msg="BatchStatistics has other bits with running statistics")
    # As ONNX's nodes compute them, to the last bit.
    for place, batch in enumerate((found[2], found[3] * found[5])):
        np.testing.assert_array_equal(found[6 + place], old[place] * kept + batch * fresh)
    tolerance = 1e-6 * max(1.0, float(np.prod(dims[:-1])) ** 0.5 / 10)
    check("BatchStatistics mean", found[2], average, FLOAT, tolerance)
    check("BatchStatistics variance", found[3], variance, FLOAT, 4 * tolerance)
    rows = float(np.prod(dims[:-1]))
    np.testing.assert_allclose(found[4], 1 / np.sqrt(found[3].astype(np.float64) + epsilon), rtol=1e-6)
    check("BatchStatistics correction", found[5], np.asarray(rows / max(rows - 1, 1)), FLOAT, 1e-6)
    # Where one row is all there is, everything is as large as the epsilon makes it.
    small = variance > 1e-3
    np.testing.assert_allclose(found[0][small], (scale[0] * inverse)[small], rtol=1e-5 + 10 * tolerance)
    y, expected = exact * found[0] + found[1], (exact - average) * inverse * scale[0] + bias[0]
    check("BatchStatistics y", y[..., small], expected[..., small], FLOAT, 1e-5 + 10 * tolerance)
    given = [dy, x, scale, stored(average, FLOAT), stored(inverse, FLOAT)]
    found = twice(compute, "BatchGradients", {}, given, [FLOAT] * 5)
    g = dy[0].astype(np.float64)
    normal = (exact - average) * inverse
    dx = (g - g.mean(axes) - normal * (g * normal).mean(axes)) * scale[0] * inverse
    made = g * found[0] + exact * found[1] + found[2]
    check("BatchGradients dx", made, dx, FLOAT, 1e-5 + 10 * tolerance, float(np.abs(g * scale[0] * inverse).max()))
    sums = max(tolerance, 1e-6) * 10
    check(
        "BatchGradients dscale",
        found[3],
        (g * normal).sum(axes),
        FLOAT,
        sums,
        float(np.abs(g * normal).sum(axes).max()) / 10,
    )
    check("BatchGradients dbias", found[4], g.sum(axes), FLOAT, sums, float(np.abs(g).sum(axes).max()) / 10)
    # The same where a Relu follows, by the sums of what it lets through.
    slope, offset = (stored(random.normal(0, 1, width), FLOAT) for _ in range(2))
    on = x[0].astype(np.float32) * slope[0] + offset[0]
    let = dy[0] * (on > 0)
    expected = twice(compute, "BatchGradients", {}, [(let, dy[1]), *given[1:]], [FLOAT] * 5)
    # Where rounding decides, either is right.
    if np.abs(on).min() > 1e-5:
        rectified = twice(compute, "BatchGradients", {}, [*given, slope, offset], [FLOAT] * 5)
        for one, other in zip(rectified, expected, strict=True):
            np.testing.assert_array_equal(one, other, err_msg="BatchGradients behind a Relu")
    # And where the gradient of a Relu is the sum of two, in which an infinite or undefined one counts nowhere else.
    for of_other, of_y, of_sum in ((of_x, of_dy, of_x), (FLOAT, of_x, of_dy), (of_dy, of_dy, FLOAT)):
        other, y = stored(random.normal(0, 1, dims), of_other), stored(random.normal(0, 1, dims), of_y)
        y[0].flat[0], other[0].flat[0] = 0, np.nan
        whole = stored(np.where(y[0] > 0, dy[0].astype(np.float32) + other[0].astype(np.float32), 0), of_sum)
        expected = [*twice(compute, "BatchGradients", {}, [whole, *given[1:]], [FLOAT] * 5), whole[0]]
        found = twice(compute, "BatchGradientsOfSum", {}, [*given, other, y], [*[FLOAT] * 5, of_sum])
        np.testing.assert_array_equal(found[-1], whole[0], err_msg="BatchGradientsOfSum dy")
        for made, wanted in zip(found[:-1], expected[:-1], strict=True):
            # Other element types are read in other numbers at a time.
            least = 1e-5 * max(1.0, float(np.abs(wanted).max())) + 1e-6 * rows**0.5
            np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=least, err_msg="BatchGradientsOfSum")


def check_pixel_means(compute: Compute, dims: tuple[int, ...], kind: int) -> None:
    """Means over height and width of images [samples, height, width, channels]."""
    x = stored(np.random.default_rng(sum(dims)).normal(1, 3, dims), kind)
    (found,) = twice(compute, "PixelMeans", {}, [x], [FLOAT])
    check("PixelMeans", found, x[0].astype(np.float64).mean((1, 2), keepdims=True), FLOAT)


def check_channels_last(
    compute: Compute, dims: tuple[int, ...], of_x: int, of_y: int, block: tuple[int, int] = (1, 1),
    before: tuple[int, int] = (0, 0), sizes: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Images [samples, channels, height, width] in blocks, channels last, padded."""
    x = stored(np.random.default_rng(sum(dims)).normal(0, 3, dims), of_x)
    settings = {"block": block, "before": before, "sizes": sizes} if sizes else {}
    (found,) = twice(compute, "ChannelsLast", settings, [x], [of_y])
    rows, columns = sizes or dims[2:]
    expected = np.zeros((dims[0], rows, columns, blocks.stored(dims[1], block)))
    for channel, y, z in np.ndindex(*dims[1:]):
        (row, down), (column, along) = divmod(y + before[0], block[0]), divmod(z + before[1], block[1])
        if row < rows and column < columns:
            expected[:, row, column, (channel * block[0] + down) * block[1] + along] = x[0][:, channel, y, z]
    np.testing.assert_array_equal(found, stored(expected, of_y)[0])


def check_max_pool(
    compute: Compute, dims: tuple[int, ...], kernel: tuple[int, int], strides: tuple[int, int], pads: tuple[int, ...],
    kinds: tuple[int, int, int], *, dilations: tuple[int, int] = (1, 1),
) -> None:  # fmt: skip
    """Forward and backward for images [samples, height, width, channels]; `kinds` of x, dy and dx.

    Many values are equal: the first in a window gets the gradient.
    """
    random, (of_x, of_dy, of_dx) = np.random.default_rng(sum(dims)), kinds
    x = stored(np.maximum(np.round(random.normal(0, 2, dims)), 0) - 1, of_x)
    samples, height, width, channels = dims
    rows, columns = (
        (size + pads[axis] + pads[axis + 2] - dilations[axis] * (kernel[axis] - 1) - 1) // strides[axis] + 1
        for axis, size in enumerate((height, width))
    )
    settings = {"kernel_shape": kernel, "strides": strides, "pads": pads, "dilations": dilations}
    dy = stored(random.normal(0, 1, (samples, rows, columns, channels)), of_dy)
    y, dx = np.full(dy[0].shape, -np.inf), np.zeros(dims)
    for row, column in np.ndindex(rows, columns):
        places = [
            (h, w)
            for r, s in np.ndindex(*kernel)
            if 0 <= (h := row * strides[0] - pads[0] + r * dilations[0]) < height
            and 0 <= (w := column * strides[1] - pads[1] + s * dilations[1]) < width
        ]
        window = np.stack([x[0][:, h, w] for h, w in places])
        y[:, row, column], first = window.max(0), window.argmax(0)
        for number, (h, w) in enumerate(places):
            dx[:, h, w] += np.where(first == number, dy[0][:, row, column], 0)
    (found,) = twice(compute, "MaxPool", settings, [x], [of_x])
    np.testing.assert_array_equal(found, y.astype(np.float32))
    found, first = twice(compute, "MaxPool", settings, [x], [of_x, UINT8])
    np.testing.assert_array_equal(found, y.astype(np.float32))
    settings["sizes"] = [height, width]
    (found,) = twice(compute, "MaxPoolGrad", settings, [dy, (first, UINT8)], [of_dx])
    check("MaxPoolGrad", found, dx, of_dx)


JOINED: list[tuple[list[tuple[int, ...]], int]] = [
    ([(2, 8, 16), (2, 24, 16)], 1), ([(3, 5), (3, 2), (3, 9)], -1), ([(1, 4), (6, 4)], 0), ([(2, 0, 8), (2, 8, 8)], 1),
]  # fmt: skip
"""Shapes that are joined, and the axis."""


def check_join(compute: Compute, sizes: Sequence[tuple[int, ...]], axis: int, kind: int) -> None:
    """Values of these sizes side by side."""
    random = np.random.default_rng(0)
    values = [stored(random.normal(size=dims), kind) for dims in sizes]
    (found,) = twice(compute, "Join", {"axis": axis}, values, [kind])
    np.testing.assert_array_equal(found, np.concatenate([array for array, _ in values], axis))
