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
from ortflow.workflow.graph.ir.watched_passes import NamedPass, Watch, run_passes, unwatched
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.normalize.branch_weights import weights_of_branches_to_initializers
from ortflow.workflow.graph.normalize.fold import fold_integers
from ortflow.workflow.graph.normalize.opset import opset_of, raise_old_opset, to_opset_18
from ortflow.workflow.graph.normalize.precision import to_single

IR_VERSION = 10
"""The newest that ONNX Runtime 1.19 reads."""
OLDEST_OPSET = 13
"""The oldest opset that `opset` converts itself; onnx's converter handles older ones."""


def _oldest_version(model: onnx.ModelProto, where: str) -> list[str]:
    opset = opset_of(model)
    if opset >= OLDEST_OPSET:
        return []
    raise_old_opset(model, OLDEST_OPSET, where)
    return [f"opset {opset} converted to {OLDEST_OPSET} by onnx's converter"]


PASSES = (
    NamedPass("negative-sizes", lambda model, _: tidy.forget_negative_sizes(model)),
    NamedPass("initializers", lambda model, _: tidy.initializers_are_no_inputs(model)),
    NamedPass("functions", lambda model, _: inline_functions(model)),
    NamedPass("sizes-checked", check_sizes),
    NamedPass("old-opset", _oldest_version),
    NamedPass("single-precision", lambda model, _: to_single(model)),
    NamedPass("opset-18", to_opset_18),
    NamedPass("combining-scatters", replace_combining_scatters),
    NamedPass("bags", lambda model, _: replace_bags(model)),
    NamedPass("inverse-spectra", lambda model, _: replace_inverse_halves(model)),
    NamedPass("cast-like", lambda model, _: tidy.cast_like_to_cast(model)),
    NamedPass("padded-pooling", lambda model, _: tidy.pad_before_pooling(model)),
    NamedPass("constants", lambda model, _: tidy.constants_to_initializers(model)),
    NamedPass("branch-weights", lambda model, _: weights_of_branches_to_initializers(model)),
    NamedPass("folded-integers", lambda model, _: fold_integers(model)),
    NamedPass("idle-transposes", lambda model, _: tidy.drop_transposes_that_move_nothing(model)),
    NamedPass("aliases", lambda model, _: tidy.resolve_aliases(model)),
    NamedPass("transposed-copies", lambda model, _: tidy.tie_transposed_copies(model)),
    NamedPass("pruned", lambda model, _: prune(model.graph)),
    NamedPass("node-names", lambda model, _: tidy.name_nodes(model)),
    NamedPass("shapes", lambda model, _: shapes.infer(model)),
    NamedPass("shapes-checked", check_inferred),
)
"""What `prepare` applies, in this order."""


def prepare(
    model: onnx.ModelProto, where: str = "model", *, in_place: bool = False, watch: Watch = unwatched
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
    return copy, notes + run_passes(PASSES, copy, where, watch)
