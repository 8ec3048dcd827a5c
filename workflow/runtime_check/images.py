"""Cases of convolution, pooling, padding and resizing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ortflow.workflow.runtime_check.case import Case, ints, node, normal
from ortflow.workflow.runtime_check.windows import Double, convolution, pooled, transposed, windows

_X2 = normal(1, 2, 6, 9, 7)


def cases() -> Iterator[Case]:
    """All cases."""
    yield from _convolutions()
    yield _transposed()
    yield from _poolings()
    yield from _resizes()


def _convolutions() -> Iterator[Case]:
    for axes, sizes in ((1, (32,)), (2, (9, 7)), (3, (5, 6, 7))):
        x, w = normal(axes, 2, 6, *sizes), normal(10 + axes, 12, 2, *[3] * axes)
        y = convolution(x, w, pads=[1] * 2 * axes, strides=[1] * axes, group=3)
        # The sum with an earlier value shows whether the memory of others was written to.
        nodes = [
            node("Conv", "x w", "c", kernel_shape=[3] * axes, pads=[1] * 2 * axes, group=3),
            node("ReduceSum", "x", "before", keepdims=0),
            node("Add", "c before", "y"),
        ]
        expected = y + x.astype(np.float64).sum()
        yield Case(f"Conv in groups over {axes} axes", nodes, {"x": x}, {"y": expected}, {"w": w})
    w = normal(20, 4, 6, 3, 3)
    dilated = convolution(_X2, w, pads=[2] * 4, strides=[1, 1], dilations=[2, 2])
    for name, attributes in (("auto_pad SAME", {"auto_pad": "SAME_UPPER"}), ("pads", {"pads": [2] * 4})):
        conv = node("Conv", "x w", "y", kernel_shape=[3, 3], dilations=[2, 2], **attributes)
        yield Case(f"Conv with dilations and {name}", [conv], {"x": _X2}, {"y": dilated}, {"w": w})
    yield _normalised()


def _normalised() -> Case:
    """The nodes of each layer in an exported convolutional network."""
    w, scale, bias, mean, variance = (
        normal(21, 4, 6, 3, 3),
        *(normal(22 + i, 4) for i in range(3)),
        1 + normal(25, 4) ** 2,
    )
    nodes = [
        node("Conv", "x w", "c", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", "c scale bias mean variance", "n"),
        node("Relu", "n", "r"),
        node("Add", "r c", "y"),
    ]
    c = convolution(_X2, w, pads=[1] * 4, strides=[2, 2])
    column = (slice(None), None, None)
    n = (c - mean[column]) / np.sqrt(variance.astype(np.float64)[column] + 1e-5) * scale[column] + bias[column]
    weights = {"w": w, "scale": scale, "bias": bias, "mean": mean, "variance": variance}
    return Case(
        "BatchNormalization after Conv", nodes, {"x": _X2}, {"y": np.maximum(n, 0) + c}, weights,
        optimizers=("ConvBNFusion", "ConvActivationFusion", "ConvAddActivationFusion"),
    )  # fmt: skip


def _transposed() -> Case:
    x, w = normal(26, 2, 4, 5, 4), normal(27, 4, 3, 3, 3)
    y = transposed(x, w, pads=[1, 0, 1, 1], strides=[2, 2], group=2, extra=[1, 0])
    deconvolution = node("ConvTranspose", "x w", "y", group=2, pads=[1, 0, 1, 1], strides=[2, 2], output_padding=[1, 0])
    return Case("ConvTranspose in groups with output_padding", [deconvolution], {"x": x}, {"y": y}, {"w": w})


def _poolings() -> Iterator[Case]:
    x = normal(28, 2, 3, 9, 9) - 3
    kernel, strides = [3, 3], [2, 2]
    options = {"kernel_shape": kernel, "strides": strides}
    patches = windows(x, kernel, pads=[1] * 4, strides=strides)
    pads = {"around": ints(0, 0, 1, 1, 0, 0, 1, 1), "zero": np.float32(0)}
    for operator, reduce in (("MaxPool", np.max), ("AveragePool", np.mean)):
        nodes = [node("Pad", "x around zero", "p"), node(operator, "p", "y", pads=[0] * 4, **options)]
        yield Case(
            f"{operator} of an image padded with zeros", nodes, {"x": x}, {"y": pooled(patches, 2, reduce)}, {},
            pads, optimizers=("Pad_Fusion",),
        )  # fmt: skip
    lowest = windows(x, kernel, pads=[1] * 4, strides=strides, fill=-np.inf)
    largest = node("MaxPool", "x", "y", pads=[1] * 4, **options)
    yield Case("MaxPool with pads", [largest], {"x": x}, {"y": pooled(lowest, 2, np.max)})
    # A window that extends beyond the padding counts only the elements inside it.
    x = normal(29, 2, 3, 8, 8)
    patches = windows(x, kernel, pads=[1, 1, 2, 2], strides=strides)
    inside = windows(np.ones((1, 1, 10, 10)), kernel, pads=[0, 0, 1, 1], strides=strides)
    average = node("AveragePool", "x", "y", pads=[1] * 4, ceil_mode=1, count_include_pad=1, **options)
    expected = pooled(patches, 2, np.sum) / pooled(inside, 2, np.sum)
    yield Case("AveragePool with ceil_mode that counts its pads", [average], {"x": x}, {"y": expected})


def _resizes() -> Iterator[Case]:
    x = normal(30, 2, 3, 5, 4)
    for size in (10, 3):
        rows, columns = _linear(5, size), _linear(4, 7)
        nodes = [node("Resize", "x - - sizes", "y", mode="linear", coordinate_transformation_mode="half_pixel")]
        y = np.einsum("ij,bcjk,lk->bcil", rows, x.astype(np.float64), columns)
        yield Case(f"Resize, linear, to {size} rows", nodes, {"x": x}, {"y": y}, {}, {"sizes": ints(2, 3, size, 7)})
    nodes = [
        node("Resize", "x - - sizes", "y", mode="nearest", nearest_mode="floor",
             coordinate_transformation_mode="asymmetric")
    ]  # fmt: skip
    y = x[:, :, np.arange(10) * 5 // 10][:, :, :, np.arange(8) * 4 // 8].astype(np.float64)
    yield Case("Resize, nearest", nodes, {"x": x}, {"y": y}, {}, {"sizes": ints(2, 3, 10, 8)})


def _linear(count: int, size: int) -> Double:
    """[size, count]: interpolation weights of each input element for each output element."""
    places = np.clip((np.arange(size) + 0.5) * count / size - 0.5, 0, count - 1)
    return np.asarray(np.maximum(0, 1 - np.abs(places[:, None] - np.arange(count))))
