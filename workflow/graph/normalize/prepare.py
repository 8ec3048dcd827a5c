"""Converts any model that `read` accepts to the one form that the rest of the package supports.

Called by `assembly` and `inspect`, after `read.read_model`.
"""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.decompose.bags import replace_bags
from ortflow.workflow.graph.decompose.scatter import replace_combining_scatters
from ortflow.workflow.graph.decompose.spectral import replace_inverse_halves
from ortflow.workflow.graph.file.limits import check_inferred, check_sizes
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.functions import inline_functions
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.normalize.branch_weights import weights_of_branches_to_initializers
from ortflow.workflow.graph.normalize.fold import fold_integers
from ortflow.workflow.graph.normalize.opset import opset_of, raise_old_opset, to_opset_18
from ortflow.workflow.graph.normalize.precision import to_single

IR_VERSION = 10
"""The newest that ONNX Runtime 1.19 reads."""
OLDEST_OPSET = 13
"""The oldest opset that `opset` converts itself; onnx's converter handles older ones."""


def prepare(
    model: onnx.ModelProto, where: str = "model", *, in_place: bool = False
) -> tuple[onnx.ModelProto, list[str]]:
    """Return a copy of `model`, or itself, in the normal form, and log lines about the changes.

    The form: IR version 10, opset 18 and com.microsoft 1, fp32, functions inlined, each weight a used initializer with
    its own name that is not an input, aliases resolved, Constant nodes and weights in branches of an If converted to
    initializers, every node named, shapes inferred. Inputs and outputs keep their names. Raises UserError if a node has
    no form in opset 18.
    """
    copy = model
    if not in_place:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
    notes: list[str] = []
    if copy.ir_version > IR_VERSION:
        notes.append(f"IR version {copy.ir_version} converted to {IR_VERSION}")
    copy.ir_version = IR_VERSION
    del copy.training_info[:]
    for node in walk.all_nodes(copy):
        if node.domain == "ai.onnx":
            node.domain = ""
    tidy.forget_negative_sizes(copy)
    tidy.initializers_are_no_inputs(copy)
    inline_functions(copy)
    check_sizes(copy, where)
    if opset_of(copy) < OLDEST_OPSET:
        notes.append(f"opset {opset_of(copy)} converted to {OLDEST_OPSET} by onnx's converter")
        raise_old_opset(copy, OLDEST_OPSET, where)
    notes += to_single(copy)
    notes += to_opset_18(copy, where)
    notes += replace_combining_scatters(copy, where)
    notes += replace_bags(copy)
    notes += replace_inverse_halves(copy)
    tidy.cast_like_to_cast(copy)
    tidy.pad_before_pooling(copy)
    tidy.constants_to_initializers(copy)
    weights_of_branches_to_initializers(copy)
    fold_integers(copy)
    tidy.drop_transposes_that_move_nothing(copy)
    notes += tidy.resolve_aliases(copy)
    notes += tidy.tie_transposed_copies(copy)
    prune(copy.graph)
    tidy.name_nodes(copy)
    shapes.infer(copy)
    check_inferred(copy, where)
    return copy, notes
