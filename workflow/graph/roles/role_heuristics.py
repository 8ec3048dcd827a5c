"""Evidence for an initializer being a parameter or a constant: position, name and values.

Called by `decide`. Each function answers one question about one initializer and decides nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

import numpy as np
import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.names import is_made_up
from ortflow.workflow.graph.operators.families import POSSIBLE_WEIGHTS, WEIGHTS, Trait, having

SINES = "a table of sines and cosines"
_POSITIONS, _FREQUENCIES = 33, 1024

# Operators that only rearrange elements: readers of their output count as readers of the initializer.
_VIEWS = frozenset(
    ["Identity", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Cast", "Expand", "Slice", "Tile"]
)

_STATE_INPUTS = (3, 4)
_RECURRENT = ("LSTM", "GRU", "RNN")
TABLES = having(Trait.LOOKS_UP)
"""Operators that look up rows of their first input by the indices in their second."""
_LINEAR = having(Trait.LINEAR)

# Usual names of buffers; the last part of the name, in lower case.
_BUFFER = re.compile(
    r"^(original_)?inv_freq$|(cos|sin)_?(cached?|table|emb)$|^(cos|sin|freqs|freqs_cis|rope)$|mask$|^masked_bias$|_ids$"
    r"|position_index$|^relative_coords_table$|^anchors?$|^(pixel_)?(mean|std)$|^mel_filters$|^window$|_buffer$|^num_batches_tracked$"
    r"|^running_(mean|var)$|^eps(ilon)?$"
)


def uses(name: str, consumers: Mapping[str, list[tuple[onnx.NodeProto, int]]]) -> list[tuple[onnx.NodeProto, int]]:
    """The nodes that read an initializer, directly or rearranged, each with the input's position."""
    nodes_read: list[tuple[onnx.NodeProto, int]] = []
    open_names, visited = [name], {name}
    while open_names:
        for node, place in consumers.get(open_names.pop(), ()):
            if node.op_type in _VIEWS and place == 0:
                fresh = [output for output in node.output if output not in visited]
                visited.update(fresh)
                open_names += fresh
            else:
                nodes_read.append((node, place))
    return nodes_read


def is_state(node: onnx.NodeProto, place: int) -> bool:
    """Whether this input is a running mean or variance."""
    return node.op_type == "BatchNormalization" and place in _STATE_INPUTS


def in_training(node: onnx.NodeProto) -> bool:
    """Whether this is a BatchNormalization in training mode."""
    return node.op_type == "BatchNormalization" and any(a.name == "training_mode" and a.i for a in node.attribute)


def is_weight(node: onnx.NodeProto, place: int) -> bool:
    """Whether an initializer at this input is a weight, whatever its name."""
    return place in WEIGHTS.get(node.op_type, ())


def is_product(node: onnx.NodeProto, place: int) -> bool:
    """Whether this is the weight of a matrix product or a convolution."""
    return node.op_type in _LINEAR and is_weight(node, place)


def is_placeholder(node: onnx.NodeProto, name: str, values: np.ndarray) -> bool:
    """Whether this is the mandatory scale or bias of a normalisation without parameters: ones or zeros."""
    if not node.op_type.endswith("Normalization") or not is_made_up(name):
        return False
    return bool(np.isin(values.reshape(-1)[:1], (0, 1)).all() and (values == values.flat[0]).all())


def is_open(node: onnx.NodeProto, place: int) -> bool:
    """Whether an initializer at this input may be a weight, depending on its name and values."""
    return place in POSSIBLE_WEIGHTS.get(node.op_type, ())


def is_bias(node: onnx.NodeProto, place: int, shape: tuple[int, ...], producers: dict[str, onnx.NodeProto]) -> bool:
    """Whether this is an Add of a vector to the result, also rearranged, of a matrix product or a convolution."""
    if node.op_type != "Add" or place not in (0, 1) or sum(d != 1 for d in shape) > 1:
        return False
    other = producers.get(node.input[1 - place])
    while other is not None and other.op_type in _VIEWS:
        other = producers.get(other.input[0])
    return other is not None and other.op_type in _LINEAR


def recurrent_biases(graph: onnx.GraphProto) -> set[str]:
    """Biases of LSTM, GRU and RNN, of shape [directions, 2 * gates * hidden]."""
    return {str(node.input[3]) for node in graph.node if node.op_type in _RECURRENT and len(node.input) > 3}


def is_buffer_name(name: str) -> bool:
    """Whether this is a usual name for buffers, which are never trained."""
    return _BUFFER.search(re.split(r"[./]", name)[-1].lower()) is not None


def constant_pattern(values: np.ndarray) -> str | None:
    """A description of values that are certainly not trained: a mask, a range, a table of sines; else None."""
    if values.size < 2:
        return None
    flat = values.reshape(-1)
    lowest = float(flat.min())
    if not np.isfinite(flat).all() or (lowest <= -9999.0 and len(np.unique(flat[:100_000])) <= 2):
        return "a mask"
    if values.ndim >= 2 and ((flat == 0) | (flat == 1)).all() and flat.min() != flat.max():
        return "zeros and ones"
    if values.ndim == 1 and flat.size > 2 and (np.diff(flat) == 1).all():
        return "a range"
    return SINES if _is_sines(values) or _is_rotary(values) else None


def _is_sines(values: np.ndarray) -> bool:
    """Rows of sin and cos pairs: no absolute value above 1, and the squares of each row sum to half its width."""
    width = values.shape[-1]
    rows = values.reshape(-1, width)
    if width < 4 or width % 2 or len(rows) < 4 or np.abs(rows).max() > 1.0 + 1e-4:
        return False
    return bool(np.allclose(np.square(rows).sum(axis=1), width / 2, rtol=1e-3))


def _is_rotary(values: np.ndarray) -> bool:
    """cos or sin of p w for the positions p = 0, 1, … along an axis, for which cos 2pw = 2 cos^2 pw - 1."""
    for axis in (axis for axis, length in enumerate(values.shape) if length >= 4 and values.ndim > 1):
        # The first positions suffice: a table may be the largest tensor of a model.
        rows = np.moveaxis(values, axis, 0)[:_POSITIONS]
        rows = rows.reshape(len(rows), -1)[:, :_FREQUENCIES].astype(np.float64)
        # Small values equal their own sines: a trained token is often initialised with such values.
        if np.ptp(rows) < 0.5 or np.abs(rows).max() > 1.0 + 1e-4:
            continue
        for doubled in (rows, 1 - 2 * rows**2):  # cos pw, or cos 2pw computed from sin pw
            half = doubled[: (len(rows) + 1) // 2]
            if np.allclose(doubled[::2], 2 * half**2 - 1, rtol=0, atol=1e-4):
                return True
    return False


def only_from(names: Collection[str], node: onnx.NodeProto, producers: dict[str, onnx.NodeProto]) -> bool:
    """Whether every graph input that `node`'s value depends on is among `names` (ignoring constants)."""
    open_names, visited, inputs = [n for n in node.input if n], set(), set()
    while open_names:
        name = open_names.pop()
        if name in visited:
            continue
        visited.add(name)
        if name in producers:
            open_names += walk.inputs(producers[name])
        elif name not in names:
            inputs.add(name)
    return not inputs
