"""Converts any model that `read` accepts to the one form that the rest of the package supports.

Called by `assembly` and `inspect`, after `read.read_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import onnx

from ortflow.workflow.graph.decompose.bags import replace_bags
from ortflow.workflow.graph.decompose.scatter import replace_combining_scatters
from ortflow.workflow.graph.decompose.spectral import replace_inverse_halves
from ortflow.workflow.graph.file.limits import check_inferred, check_sizes
from ortflow.workflow.graph.ir import shapes, walk
from ortflow.workflow.graph.ir.functions import inline_functions
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.ir.passes import Pass, Passes, Watch, copied, unwatched
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.normalize.branch_weights import weights_of_branches_to_initializers
from ortflow.workflow.graph.normalize.fold import fold_integers
from ortflow.workflow.graph.normalize.opset import opset_of, raise_old_opset, to_opset_18
from ortflow.workflow.graph.normalize.precision import to_single

IR_VERSION = 10
"""The newest that ONNX Runtime 1.19 reads."""
OLDEST_OPSET = 13
"""The oldest opset that `opset` converts itself; onnx's converter handles older ones."""


def _oldest_version(model: onnx.ModelProto, location: str) -> list[str]:
    opset = opset_of(model)
    if opset >= OLDEST_OPSET:
        return []
    raise_old_opset(model, OLDEST_OPSET, location)
    return [f"opset {opset} converted to {OLDEST_OPSET} by onnx's converter"]


@dataclass
class Preparation:
    """What the passes read besides the model, and what they report."""

    where: str
    """The model's name in messages."""
    notes: list[str] = field(default_factory=list)
    """Lines for the log."""


def _pass(
    name: str,
    change: Callable[[onnx.ModelProto, str], Sequence[str] | None],
    effect: str,
    needs: tuple[str, ...] = (),
) -> Pass[Preparation]:
    """A pass by a function of the model, which it changes, and its name in messages; returns lines for the log."""

    def run(model: onnx.ModelProto, state: Preparation) -> None:
        state.notes += change(model, state.where) or ()

    return Pass(name, run, effect, needs)


PASSES: Passes[Preparation] = Passes(
    "",
    (
        _pass("negative-sizes", lambda model, _: tidy.forget_negative_sizes(model), "sizes below 0 become unknown"),
        _pass("initializers", lambda model, _: tidy.initializers_are_no_inputs(model), "no weight is also an input"),
        _pass("functions", lambda model, _: inline_functions(model), "functions of the model become their nodes"),
        _pass("sizes-checked", check_sizes, "nothing; refuses tensors that are too large"),
        _pass("old-opset", _oldest_version, "opsets before 13, by onnx's converter"),
        _pass("single-precision", lambda model, _: to_single(model), "fp16, bf16 and double become fp32"),
        _pass("opset-18", to_opset_18, "operators of other opsets", needs=("functions", "old-opset")),
        _pass("combining-scatters", replace_combining_scatters, "scatters that combine", needs=("opset-18",)),
        _pass("bags", lambda model, _: replace_bags(model), "loops of embedding bags", needs=("opset-18",)),
        _pass("inverse-spectra", lambda model, _: replace_inverse_halves(model), "inverse transforms of half spectra"),
        _pass("cast-like", lambda model, _: tidy.cast_like_to_cast(model), "CastLike becomes Cast"),
        _pass("padded-pooling", lambda model, _: tidy.pad_before_pooling(model), "pooling pads in a node of its own"),
        _pass("constants", lambda model, _: tidy.constants_to_initializers(model), "Constant nodes"),
        _pass("branch-weights", lambda model, _: weights_of_branches_to_initializers(model), "weights in branches"),
        _pass(
            "folded-integers", lambda model, _: fold_integers(model), "integers that are constant", needs=("constants",)
        ),
        _pass("idle-transposes", lambda model, _: tidy.drop_transposes_that_move_nothing(model), "idle Transposes"),
        _pass("aliases", lambda model, _: tidy.resolve_aliases(model), "Identity nodes", needs=("constants",)),
        _pass("transposed-copies", lambda model, _: tidy.tie_transposed_copies(model), "transposed copies of weights"),
        _pass("pruned", lambda model, _: prune(model.graph), "nodes that no output needs"),
        _pass("node-names", lambda model, _: tidy.name_nodes(model), "names of nodes", needs=("pruned",)),
        _pass("shapes", lambda model, _: shapes.infer(model), "shapes of values", needs=("pruned",)),
        _pass("shapes-checked", check_inferred, "nothing; refuses values that are too large", needs=("shapes",)),
    ),
)
"""What `prepare` applies, in this order."""


def prepare(
    model: onnx.ModelProto, location: str = "model", *, in_place: bool = False, watch: Watch = unwatched
) -> tuple[onnx.ModelProto, list[str]]:
    """Return a copy of `model`, or itself, in the normal form, and log lines about the changes.

    The form: IR version 10, opset 18 and com.microsoft 1, fp32, functions inlined, each weight a used initializer with
    its own name that is not an input, aliases resolved, Constant nodes and weights in branches of an If converted to
    initializers, every node named, shapes inferred. Inputs and outputs keep their names. Raises UserError if a node has
    no form in opset 18.
    """
    copy, state = model if in_place else copied(model), Preparation(location)
    if copy.ir_version > IR_VERSION:
        state.notes.append(f"IR version {copy.ir_version} converted to {IR_VERSION}")
    copy.ir_version = IR_VERSION
    del copy.training_info[:]
    for node in walk.all_nodes(copy):
        if node.domain == "ai.onnx":
            node.domain = ""
    return PASSES.run(copy, state, watch), state.notes
