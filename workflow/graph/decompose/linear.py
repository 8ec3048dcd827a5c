"""Products: Einsum as matrix products, and other products in forms that can be differentiated."""

from __future__ import annotations

import string
from collections.abc import Sequence

import numpy as np
import onnx

from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.replacement import Context, Replacement


def einsum(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Einsum of any number of inputs, contracted pairwise from the left."""
    w = Replacement(node, context)
    terms, result = _terms(w)
    longer = {
        label for place, term in enumerate(terms) for label, n in zip(term, w.shape(place), strict=True) if n != 1
    }
    values = [_diagonal(w, *_unbroadcast(w, place, term, longer)) for place, term in enumerate(terms)]
    value, labels = values[0]
    for place, (other, term) in enumerate(values[1:], start=1):
        later = set(result).union(*(term for _, term in values[place + 1 :]))
        value, labels = _pair(w, value, labels, other, term, later)
    value, labels = _summed(w, value, labels, set(result))
    return w.done(_ordered(w, value, labels, result))


def _terms(w: Replacement) -> tuple[list[str], str]:
    """One label per axis of each input and of the output, including the axes that an ellipsis stands for."""
    equation = w.attribute("equation", "").replace(" ", "")
    inputs, arrow, result = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        every = inputs.replace(",", "").replace("...", "")
        result = "..." * ("..." in inputs) + "".join(sorted(label for label in set(every) if every.count(label) == 1))
    if "..." in equation:
        unused = [label for label in string.ascii_letters if label not in equation]
        hidden = [w.rank(place) - len(term.replace("...", "")) for place, term in enumerate(terms) if "..." in term]
        # Ellipses are aligned at their last axis, so each takes the last of these labels.
        labels = "".join(unused[: max(hidden, default=0)])
        lengths = iter(hidden)
        terms = [
            term.replace("...", labels[len(labels) - next(lengths) :]) if "..." in term else term for term in terms
        ]
        result = result.replace("...", labels)
    for place, term in enumerate(terms):
        if w.rank(place) != len(term):
            raise w.refusal(f"its equation {equation!r} does not fit its inputs")
    if len(set(result)) < len(result) or not set(result) <= set("".join(terms)):
        raise w.refusal(f"its equation {equation!r} has an output that its inputs do not determine")
    return terms, result


def _unbroadcast(w: Replacement, place: int, term: str, longer: set[str]) -> tuple[str, str]:
    """Remove an input's axes of length 1 that are broadcast, and their labels."""
    gone = [i for i, n in enumerate(w.shape(place)) if n == 1 and term[i] in longer]
    if not gone:
        return w.input(place), term
    return w("Squeeze", w.input(place), w.ints(*gone)), "".join(x for i, x in enumerate(term) if i not in gone)


def _diagonal(w: Replacement, value: str, term: str) -> tuple[str, str]:
    """Make the labels of an input unique: for a repeated label, select the diagonal with a mask and a sum."""
    for label in dict.fromkeys(term):
        while term.count(label) > 1:
            first = term.index(label)
            second = term.index(label, first + 1)
            order = [i for i in range(len(term)) if i not in (first, second)] + [first, second]
            turned = w("Transpose", value, perm=order)
            length = w("Squeeze", w("Shape", value, start=first, end=first + 1))
            places = w("Range", w.constant(0, "int64"), length, w.constant(1, "int64"))
            mask = w("Equal", w("Unsqueeze", places, w.ints(1)), places)
            diagonal = w("Where", mask, turned, w.constant(0.0))
            value = w("ReduceSum", diagonal, w.ints(-1), keepdims=0)
            term = "".join(term[i] for i in order[:-1])
    return value, term


def _summed(w: Replacement, value: str, labels: str, remaining: set[str]) -> tuple[str, str]:
    """Sum over the labels that are no longer needed."""
    gone = [i for i, label in enumerate(labels) if label not in remaining]
    if not gone:
        return value, labels
    return w("ReduceSum", value, w.ints(*gone), keepdims=0), "".join(x for x in labels if x in remaining)


def _ordered(w: Replacement, value: str, labels: str, order: Sequence[str]) -> str:
    perm = [labels.index(label) for label in order]
    return value if perm == sorted(perm) else w("Transpose", value, perm=perm)


def _pair(w: Replacement, a: str, a_labels: str, b: str, b_labels: str, later: set[str]) -> tuple[str, str]:
    """Product of two terms, summed over the labels that both have and that are not needed later."""
    a, a_labels = _summed(w, a, a_labels, later | set(b_labels))
    b, b_labels = _summed(w, b, b_labels, later | set(a_labels))
    batch = [x for x in a_labels if x in b_labels and x in later]
    inner = [x for x in a_labels if x in b_labels and x not in later]
    rows = [x for x in a_labels if x not in b_labels]
    columns = [x for x in b_labels if x not in a_labels]
    a = _ordered(w, a, a_labels, [*batch, *rows, *inner])
    b = _ordered(w, b, b_labels, [*batch, *inner, *columns])
    counts = len(batch), len(rows), len(inner), len(columns)
    sizes = _sizes(w, a, 0, counts[0]), _sizes(w, a, counts[0], counts[0] + counts[1])
    depth = _product(w, _sizes(w, a, counts[0] + counts[1], sum(counts[:3])))
    width = _sizes(w, b, counts[0] + counts[2], counts[0] + counts[2] + counts[3])
    left_matrix = w("Reshape", a, w("Concat", *sizes[0], _product(w, sizes[1]), depth, axis=0))
    right = w("Reshape", b, w("Concat", *sizes[0], depth, _product(w, width), axis=0))
    shape = [*sizes[0], *sizes[1], *width]
    product = w("MatMul", left_matrix, right)
    value = w("Reshape", product, w("Concat", *shape, axis=0) if shape else w.constant([], "int64"))
    return value, "".join([*batch, *rows, *columns])


def _sizes(w: Replacement, value: str, start: int, end: int) -> list[str]:
    return [w("Shape", value, start=i, end=i + 1) for i in range(start, end)]


def _product(w: Replacement, sizes: list[str]) -> str:
    result = sizes[0] if sizes else w.ints(1)
    for size in sizes[1:]:
        result = w("Mul", result, size)
    return result


def matrix_by_vector(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto] | None:
    """MatMul with a vector, which ONNX Runtime differentiates only as a matrix of one column or one row.

    A vector before a single matrix needs no change.
    """
    w = Replacement(node, context)
    ranks = [shapes.rank(context.types, w.input(place)) for place in (0, 1)]
    if ranks[1] == 1:
        column = w("Unsqueeze", w.input(1), w.ints(1))
        return w.done(w("Squeeze", w("MatMul", w.input(0), column), w.ints(-1)))
    if ranks[0] == 1 and ranks[1] != 2:
        row = w("Unsqueeze", w.input(0), w.ints(0))
        return w.done(w("Squeeze", w("MatMul", row, w.input(1)), w.ints(-2)))
    return None


def col2im(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Col2Im (torch.nn.Fold): the elements of each column are added at their positions in the image, or in a discarded
    one.
    """
    w = Replacement(node, context)
    image, block = ([int(n) for n in w.known_value(place, noun)] for place, noun in ((1, "image"), (2, "block")))
    axes = len(image)
    strides, dilations = w.attribute("strides", [1] * axes), w.attribute("dilations", [1] * axes)
    pads = w.attribute("pads", [0] * (2 * axes))
    flat: np.ndarray = np.zeros((1, 1), np.int64)
    inside: np.ndarray = np.ones((1, 1), bool)
    for i, (size, width) in enumerate(zip(image, block, strict=True)):
        reach = size + pads[i] + pads[axes + i] - dilations[i] * (width - 1) - 1
        starts = np.arange(reach // strides[i] + 1) * strides[i] - pads[i]
        places = np.arange(width)[:, None] * dilations[i] + starts
        within = (places >= 0) & (places < size)
        # Rows index the elements of a block, columns the blocks; the last axis varies fastest.
        flat = (flat[:, None, :, None] * size + places[:, None, :]).reshape(len(flat) * width, -1)
        inside = (inside[:, None, :, None] & within[:, None, :]).reshape(flat.shape)
    pixels = int(np.prod(image))
    index = w.constant(np.where(inside, flat, pixels).reshape(1, -1), np.int64)
    columns = w("Reshape", w.input(0), w.ints(-1, inside.size))
    rows = w("Shape", columns, start=0, end=1)
    empty = w("Expand", w.constant(0.0), w("Concat", rows, w.ints(pixels + 1), axis=0))
    indices = w("Expand", index, w("Shape", columns))
    added = w("ScatterElements", empty, indices, columns, axis=1, reduction="add")
    cropped = w("Slice", added, w.ints(0), w.ints(pixels), w.ints(1))
    shape = w("Concat", w("Shape", w.input(0), start=0, end=1), w.ints(-1, *image), axis=0)
    return w.done(w("Reshape", cropped, shape))


LINEAR = {"Col2Im": col2im, "Einsum": einsum}
