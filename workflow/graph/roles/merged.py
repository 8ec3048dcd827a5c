"""Finds parameters that an exporter merged because their values were equal: they would be trained as one.

Called by `export_warnings`. A fresh model has many equal parameters (scales of one, biases of zero). Merged parameters
are distinguished from tied ones by the modules that read them, if the file records them; by other equal tensors that
were not merged; and by the matrices of the same layers, which are shared if the layers are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.roles import role_heuristics, scopes
from ortflow.workflow.graph.roles.decide import Roles

_MERGED_AT_MOST = 1024
"""In elements: the dynamo exporter merges no larger tensors, so two larger ones that are equal prove nothing."""

Use = tuple[onnx.NodeProto, int]


def merged_parameters(model: onnx.ModelProto, roles: Roles) -> list[str]:
    """One sentence for each trained parameter that stands for several, judged by its readers."""
    moving = ("trained", "state")
    uniform = [t for t in model.graph.initializer if roles[t.name].role in moving and _is_uniform(t)]
    if not uniform:
        return []
    consumers, producers = walk.readers(model.graph), walk.producers(model.graph)
    sentences = []
    for tensor in uniform:
        uses = role_heuristics.uses(tensor.name, consumers)
        if len(_readers(uses, producers)) < 2:
            continue
        ownership = [scopes.belongs(tensor.name, node) for node, _ in uses]
        if len({role_heuristics.is_state(*use) for use in uses}) == 2:
            merged = True  # a parameter with a running statistic
        elif None in ownership:
            merged = not _shares_layers(len(uses), model, consumers) and not _has_equals(uniform)
        else:
            # A module with several names in the tree is read under one of them, as are its matrices.
            merged = False in ownership and len(uses) not in _uses_of_matrices(model, consumers)
        if merged:
            sentences.append(_sentence(tensor, uses))
    return sentences


def _shares_layers(count: int, model: onnx.ModelProto, consumers: Mapping[str, list[Use]]) -> bool:
    """Whether most matrices are read several times, or one of them `count` times, as the parameter is."""
    counts = list(_uses_of_matrices(model, consumers))
    return sum(reads > 1 for reads in counts) * 2 > len(counts) or count in counts


def _uses_of_matrices(model: onnx.ModelProto, consumers: Mapping[str, list[Use]]) -> Iterator[int]:
    """For each matrix, the number of products that read it: several if a layer is used several times, as in ALBERT."""
    for tensor in model.graph.initializer:
        places = [use for use in role_heuristics.uses(tensor.name, consumers) if role_heuristics.is_weight(*use)]
        if len(tensor.dims) >= 2 and tensor.data_type == onnx.TensorProto.FLOAT and places:
            yield sum(node.op_type not in role_heuristics.TABLES for node, _ in places)


def _has_equals(uniform: Sequence[onnx.TensorProto]) -> bool:
    """Whether two of these are equal: then the exporter did not merge equal tensors."""
    keys = set()
    for tensor in uniform:
        if 1 < math.prod(tensor.dims) <= _MERGED_AT_MOST:
            key = (tuple(tensor.dims), float(numpy_helper.to_array(tensor).flat[0]))
            if key in keys:
                return True
            keys.add(key)
    return False


def _readers(uses: Sequence[Use], producers: Mapping[str, onnx.NodeProto]) -> set[object]:
    """The layers that read a parameter: for a bias, the weight of the product it is added to; else the node."""
    readers: set[object] = set()
    for node, place in uses:
        product = producers.get(node.input[1 - place]) if node.op_type == "Add" else node if place == 2 else None
        if product is not None and role_heuristics.is_product(product, 1):
            readers.add(product.input[1])
        else:
            readers.add((tuple(node.output), place))
    return readers


def _is_uniform(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type != onnx.TensorProto.FLOAT or not tensor.dims or not math.prod(tensor.dims):
        return False
    flat = numpy_helper.to_array(tensor).reshape(-1)
    return bool(np.equal(flat, flat[0]).all())


def _sentence(tensor: onnx.TensorProto, uses: Sequence[Use]) -> str:
    kinds = sorted({node.op_type for node, _ in uses})
    return (
        f"parameter {tensor.name!r} is used in {len(uses)} places ({', '.join(kinds)}): the exporter merged"
        " parameters of equal value, which would train as one"
    )
