"""Sets Dropout and BatchNormalization to training or evaluation mode, whatever the file has.

Exporters write most models in evaluation mode; a Dropout that the exporter removed cannot be restored. Called by
`assembly` on graphs of opset 18, before the loss is attached. Dropouts are numbered: the number and the seed of a run
determine the mask that ortflow's kernels compute, on whatever device and in whatever part of a divided model. ONNX
Runtime's kernel draws from the process's generator, which is seeded before a run; nodes get no `seed`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
from onnx import helper

from ortflow.workflow.graph.ir.edit import Editor, attributes_of, constants_of, replace
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.ir.origin import DROPOUT
from ortflow.workflow.graph.objective.synced import Replicas, mark, over_replicas

_MEAN, _VARIANCE = 3, 4


def train_mode(
    graph: onnx.GraphProto, frozen: Collection[str] = (), replicas: Replicas | None = None
) -> tuple[list[str], dict[str, str]]:
    """Set training mode, in place; returns log lines, and for each running statistic its updated value.

    A BatchNormalization with `frozen` statistics continues to use them. With `replicas`, statistics of the batch run
    over the ranks.
    """
    edit = Editor(graph)
    switched, ratios_found = _dropout_on(edit)
    notes = []
    if switched:
        ratios = ", ".join(f"{ratio:g}" for ratio in sorted(ratios_found))
        notes.append(f"switched on {_nodes(switched, 'Dropout')} of ratio {ratios} for training")
    switched, updates = _normalization_on(edit, frozen, replicas)
    sort_nodes(graph)
    if switched:
        notes.append(f"switched {_nodes(switched, 'BatchNormalization')} to batch statistics for training")
    return notes, updates


def evaluation_mode(graph: onnx.GraphProto) -> None:
    """Set evaluation mode, in place: no Dropout, and BatchNormalization with its running statistics."""
    renamed: dict[str, str] = {}
    outputs = {value.name for value in graph.output}
    nodes = []
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        if node.op_type == "Dropout" and node.domain == "":
            if len(node.output) > 1 and node.output[1]:
                # The mask is meaningless here but may be read: keep the node, which passes its input through.
                del node.input[2:], node.attribute[:]
            elif node.output[0] in outputs:
                _become_identity(node)
            else:
                renamed[node.output[0]] = node.input[0]
                continue
        elif node.op_type == "BatchNormalization" and node.domain == "":
            _by_statistics(node)
        nodes.append(node)
    replace(graph.node, nodes)


def _dropout_on(edit: Editor) -> tuple[int, set[float]]:
    """Number of nodes that were switched on, and their ratios."""
    constants = constants_of(edit.graph)
    switched, ratios = 0, set()
    dropouts = [node for node in edit.graph.node if node.op_type == "Dropout" and node.domain == ""]
    for number, node in enumerate(dropouts):
        ratio_name, mode_name = [*node.input, "", ""][1:3]
        ratio = constants.get(ratio_name) if ratio_name else np.float32(0.5)
        if ratio is not None and float(ratio) == 0.0:
            _become_identity(node)
            continue
        was_on = bool(mode_name) and (mode_name not in constants or bool(constants[mode_name]))
        if not was_on:
            switched += 1
            ratios |= set() if ratio is None else {float(ratio)}
        node.input[:] = [node.input[0], ratio_name or edit.constant(0.5), edit.constant(True, "bool")]
        del node.attribute[:]
        if len(node.output) < 2:
            node.output.append(edit.fresh("mask"))
        replace(node.metadata_props, [noted for noted in node.metadata_props if noted.key != DROPOUT])
        node.metadata_props.add(key=DROPOUT, value=str(number))
    return switched, ratios


def _normalization_on(edit: Editor, frozen: Collection[str], replicas: Replicas | None) -> tuple[int, dict[str, str]]:
    """Number of nodes that were switched, and the name of each updated running statistic."""
    switched = 0
    updates: dict[str, str] = {}
    for node in list(edit.graph.node):
        if node.op_type != "BatchNormalization" or node.domain != "":
            continue
        if node.input[_MEAN] in frozen and node.input[_VARIANCE] in frozen:
            _keep_statistics(edit, node)
            continue
        attributes = attributes_of(node)
        switched += not attributes.get("training_mode", 0)
        # ONNX's momentum is the share of the old statistics, PyTorch's that of the batch: 0.9 here is 0.1 there.
        momentum = float(attributes.get("momentum", 0.9))
        statistics = (node.input[_MEAN], node.input[_VARIANCE])
        if replicas is None:
            batch = [edit.fresh("mean"), edit.fresh("variance")]
            count = edit.cast(edit("Div", edit("Size", node.input[0]), edit("Size", batch[0])))
        else:
            *batch, count = over_replicas(edit, node.input[0], replicas)
        # A layer that is called twice continues from its first call's statistics.
        old = [updates.get(name, name) for name in statistics]
        new = _moved(edit, count, old, batch, momentum)
        for place, name in enumerate(node.output[1:]):
            # The file's own names for the updated statistics.
            if name:
                edit("Identity", new[place], output=name)
        if replicas is None:
            node.input[_MEAN], node.input[_VARIANCE] = _written_over(edit, node.input[0])
            node.output[:] = [node.output[0], *batch]
            _set(node, momentum=0.0, training_mode=1)
        else:
            node.input[_MEAN], node.input[_VARIANCE] = batch
            _by_statistics(node)
            mark(node, replicas)
        updates.update(zip(statistics, new, strict=True))
    return switched, updates


def _written_over(edit: Editor, data: str) -> tuple[str, str]:
    """Two per-channel values that no other node with different data shares.

    ONNX Runtime's kernel writes the new statistics over the old ones even if other nodes read those, and merges equal
    constants of two layers. With momentum 0 the old ones have no effect.
    """
    pixels = edit("Reshape", data, edit.ints(0, 0, -1))
    first = edit("Slice", pixels, edit.ints(0, 0), edit.ints(1, 1), edit.ints(0, 2))
    numbers = edit("Reshape", first, edit.ints(-1))
    return edit("Neg", numbers), edit("Abs", numbers)


def _moved(edit: Editor, count: str, old: Sequence[str], batch: Sequence[str], momentum: float) -> list[str]:
    """The updated running mean and variance, as in torch.nn.BatchNorm.

    momentum*old + (1 - momentum)*batch, where the batch's variance is the unbiased v*n/(n - 1). v is the mean squared
    deviation over the n elements of a channel, `count` in fp32.
    """
    one = edit.constant(1.0)
    fewer = edit("Max", edit("Sub", count, one), one)
    # ONNX's own running variance moves towards the biased variance ("population size N"), PyTorch's does not.
    unbiased = edit("Mul", batch[1], edit("Div", count, fewer))
    old_share, fresh = edit.constant(momentum), edit.constant(1 - momentum)
    return [
        edit("Add", edit("Mul", before, old_share), edit("Mul", now, fresh))
        for before, now in zip(old, (batch[0], unbiased), strict=True)
    ]


def _keep_statistics(edit: Editor, node: onnx.NodeProto) -> None:
    """Set evaluation mode; outputs for updated statistics get the old values."""
    for place, name in enumerate(node.output[1:], start=_MEAN):
        if name:
            edit("Identity", node.input[place], output=name)
    _by_statistics(node)


def _by_statistics(node: onnx.NodeProto) -> None:
    _set(node, training_mode=0)
    del node.output[1:]


def _become_identity(node: onnx.NodeProto) -> None:
    del node.input[1:], node.output[1:], node.attribute[:]
    node.op_type = "Identity"


def _set(node: onnx.NodeProto, **attributes: float) -> None:
    attributes_left = [a for a in node.attribute if a.name not in attributes]
    replace(
        node.attribute, [*attributes_left, *(helper.make_attribute(name, value) for name, value in attributes.items())]
    )


def _nodes(count: int, operator: str) -> str:
    return f"{count} {operator} node{'s' if count > 1 else ''}"
