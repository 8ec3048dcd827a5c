"""Cross-entropy over a vocabulary that parts share, as one node while a graph is differentiated.

Called for half precision on GPUs. `division.scores` writes the loss with standard operators and notes on its last node
what it computes (`note`). `shared` replaces it by SharedCrossEntropy (labels, scores) -> the sum of the losses, and for
each row the logarithm of the sum of the exponentials over all parts; its gradient is the operator CrossEntropyGrad.
`spread` then replaces SharedCrossEntropy by the operator CrossEntropyShare, which reads a part's scores once, and three
reductions of one number for each row.
"""

from __future__ import annotations

import json

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.collective import Kind, collective
from ortflow.workflow.graph.ir.edit import Editor, attributes_of, described, dims_of, import_domain, replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes

OPERATOR, SHARE, GRADIENT = "SharedCrossEntropy", "CrossEntropyShare", "CrossEntropyGrad"
LABELS = ("start", "total", "ignore")
"""Attributes of the operators: the first class of this part, the number of all classes, and the label of rows that do
not count, if there is one."""
_KEY = "ortflow.shared_entropy"
"""Metadata key of the loss: what `shared` needs, as JSON."""


def note(node: onnx.NodeProto, scores: str, labels: str, **flags: int) -> None:
    """Note on the node that makes the summed loss what it computes.

    Parameters
    ----------
    scores, labels
        [rows, classes of this part], and int64 [rows].
    flags
        `LABELS`, `channel` and `parts`.
    """
    described_by = json.dumps({"scores": scores, "labels": labels, "flags": flags})
    node.metadata_props.append(onnx.StringStringEntryProto(key=_KEY, value=described_by))


def shared(model: onnx.ModelProto) -> None:
    """Replace the losses that `note` has noted, in place."""
    graph, replaced = model.graph, False
    descriptions = described(graph)
    for node in list(graph.node):
        noted = next((prop.value for prop in node.metadata_props if prop.key == _KEY), None)
        if noted is None:
            continue
        said = json.loads(noted)
        dims = dims_of(descriptions[said["scores"]]) if said["scores"] in descriptions else None
        if dims is None or len(dims) != 2:
            continue
        loss = node.output[0]
        lse = Editor(graph).fresh(f"{loss}/lse")
        node.CopyFrom(
            helper.make_node(
                OPERATOR, [said["labels"], said["scores"]], [loss, lse], node.name, domain=CUDA_DOMAIN, **said["flags"]
            )
        )
        graph.value_info.append(helper.make_tensor_value_info(lse, TensorProto.FLOAT, dims[:1]))
        if loss not in descriptions:
            graph.value_info.append(helper.make_tensor_value_info(loss, TensorProto.FLOAT, []))
        replaced = True
    if replaced:
        import_domain(model, CUDA_DOMAIN)
        prune(graph)


def spread(model: onnx.ModelProto) -> None:
    """Write the SharedCrossEntropy nodes of a differentiated graph as what parts compute and reduce, in place."""
    nodes = [node for node in model.graph.node if node.op_type == OPERATOR and node.domain == CUDA_DOMAIN]
    if not nodes:
        return
    edit = Editor(model.graph)
    descriptions = described(model.graph)
    for node in nodes:
        _spread(edit, node, dims_of(descriptions[node.output[1]]))
    replace(model.graph.node, [node for node in model.graph.node if node.op_type != OPERATOR])
    sort_nodes(model.graph)


def _spread(edit: Editor, node: onnx.NodeProto, rows: tuple[int | str | None, ...] | None) -> None:
    flags, (labels, scores), (loss, lse) = attributes_of(node), node.input, node.output
    channel, parts = int(flags["channel"]), int(flags["parts"])
    label_flags = {name: int(flags[name]) for name in LABELS if name in flags}

    def row(name: str) -> str:
        """A new value of one number for each row."""
        value = edit.fresh(f"{loss}/{name}")
        edit.graph.value_info.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, rows))
        return value

    def reduced(value: str, name: str, kind: Kind = Kind.ALL_REDUCE) -> str:
        return collective(edit, kind, value, channel, parts, row(name))

    most, total, picked = edit.write(
        SHARE, [labels, scores], [row("most"), row("total"), row("picked")], CUDA_DOMAIN, **label_flags
    )
    largest = reduced(most, "largest", Kind.ALL_REDUCE_MAX)
    scaled_total = edit("Mul", total, edit("Exp", edit("Sub", most, largest)))
    edit("Add", largest, edit("Log", reduced(scaled_total, "sum")), output=lse)
    losses = edit("Sub", lse, reduced(picked, "score"))
    if "ignore" in flags:
        counted = edit("Not", edit("Equal", labels, edit.constant(label_flags["ignore"], "int64")))
        losses = edit("Where", counted, losses, edit.constant(0.0))
    edit.total(losses, loss)
