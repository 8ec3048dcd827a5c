"""The value of one node, computed before a run. Called by `known`, and by the limits of a file.

ONNX's reference implementation computes any node, but its import takes a tenth of a second, and most graphs need it
only for shapes. Those operators are computed here in their plain forms. What fails here is left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

_NEWEST = 1 << 30
_PLAIN_TYPES = frozenset({TensorProto.BOOL, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64})


def value_of(
    node: onnx.NodeProto,
    output: str,
    inputs: Mapping[str, np.ndarray | None],
    versions: Mapping[str, int] | None = None,
) -> np.ndarray:
    """Return an output of a node.

    Parameters
    ----------
    inputs
        Values of the node's inputs by name, without those left out.
    versions
        Opset versions by domain; by default the newest.

    Raises
    ------
    Exception
        What ONNX's reference implementation raises, and numpy below it, if it does not know the node or the inputs do
        not fit it.
    """
    value = _plainly(node, inputs, _NEWEST if versions is None else versions.get("", 1))
    return _by_reference(node, output, inputs, versions) if value is None else value


def _plainly(node: onnx.NodeProto, inputs: Mapping[str, np.ndarray | None], version: int) -> np.ndarray | None:
    compute, first, counts = _OPERATORS.get(node.op_type, (None, 0, range(0)))
    arrays = [inputs.get(name) for name in node.input]
    if compute is None or node.domain or version < first or len(arrays) not in counts:
        return None
    if any(array is None or array.dtype == object for array in arrays) or len(node.output) != 1:
        return None
    with suppress(Exception):
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        return np.asarray(compute(*arrays, **attributes))
    return None


def _by_reference(
    node: onnx.NodeProto, output: str, inputs: Mapping[str, np.ndarray | None], versions: Mapping[str, int] | None
) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    if versions is None:
        evaluator = ReferenceEvaluator(node)
    else:
        reads, makes = ([onnx.ValueInfoProto(name=name) for name in names] for names in (inputs, [output]))
        evaluator = ReferenceEvaluator(helper.make_graph([node], "node", reads, makes), dict(versions))
    return np.asarray(evaluator.run([output], dict(inputs))[0])


def _cast(array: np.ndarray, *, to: int) -> np.ndarray:
    if to not in _PLAIN_TYPES:
        raise ValueError(to)
    return array.astype(helper.tensor_dtype_to_np_dtype(to))


def _concat(*arrays: np.ndarray, axis: int) -> np.ndarray:
    return np.concatenate(arrays, axis)


def _gather(array: np.ndarray, places: np.ndarray, *, axis: int = 0) -> np.ndarray:
    return np.take(array, places, axis=axis)


def _product(array: np.ndarray, axes: np.ndarray, *, keepdims: int = 1) -> np.ndarray:
    return np.asarray(np.prod(array, axis=_listed(axes), keepdims=keepdims != 0, dtype=array.dtype))


def _slice(
    array: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    axes: np.ndarray | None = None,
    steps: np.ndarray | None = None,
) -> np.ndarray:
    places = range(len(starts)) if axes is None else axes
    spans = [slice(None)] * array.ndim
    for place, start, end, step in zip(
        places, starts, ends, [1] * len(starts) if steps is None else steps, strict=True
    ):
        spans[place] = slice(start, end, step)
    return array[tuple(spans)]


def _squeeze(array: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.squeeze(array, axis=_listed(axes))


def _unsqueeze(array: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(array, axis=_listed(axes))


def _listed(axes: np.ndarray) -> tuple[int, ...]:
    if axes.ndim != 1 or not axes.size:
        raise ValueError(axes)
    return tuple(axes.tolist())


def _of_equal_types(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def checked(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        if first.dtype != second.dtype:
            raise TypeError(second.dtype)
        return compute(first, second)

    return checked


_OPERATORS: dict[str, tuple[Callable[..., Any], int, range]] = {
    "Add": (_of_equal_types(np.add), 7, range(2, 3)),
    "Cast": (_cast, 6, range(1, 2)),
    "Concat": (_concat, 4, range(1, 1 << 16)),
    "Equal": (_of_equal_types(np.equal), 7, range(2, 3)),
    "Gather": (_gather, 1, range(2, 3)),
    "Mul": (_of_equal_types(np.multiply), 7, range(2, 3)),
    "ReduceProd": (_product, 18, range(2, 3)),
    "Slice": (_slice, 10, range(3, 6)),
    "Squeeze": (_squeeze, 13, range(2, 3)),
    "Sub": (_of_equal_types(np.subtract), 7, range(2, 3)),
    "Unsqueeze": (_unsqueeze, 13, range(2, 3)),
}
"""By operator: the function, the version that it is of, and the numbers of inputs."""
