"""The update of a rule that reads norms of whole tensors, in two graphs for ranks that may hold pieces of them.

The first computes the sums of squares of a rank's pieces, the ranks add them up, and the second computes the update
from the sums. Both are made from the update of the rule, which takes its norms from `Builder.square_sum`; LAMB has its
own (`lamb_shares`). Called by the trainers for ZeRO and for divided models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.ir.in_place import ELEMENTWISE
from ortflow.workflow.graph.ir.order import drop_unread_inputs, needed_by, prune
from ortflow.workflow.optim import lamb_shares
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.graph import update_of
from ortflow.workflow.optim.segments import Piece, Segment
from ortflow.workflow.spec.optimizers import Optimizer


@dataclass(frozen=True)
class NormGraphs:
    """The two graphs for any pieces."""

    first: Callable[[Sequence[Piece]], onnx.ModelProto]
    """Its outputs of the names `norms` are fp64 [pieces]."""
    second: Callable[[Sequence[Piece], int], onnx.ModelProto]
    """Of pieces and the number of tensors. Its inputs of the names `norms` are fp64 [tensors]."""
    norms: tuple[str, ...]
    keeps_changes: bool = False
    """The first also writes the moments, and `change.i` to the memory of `gradients.i`, where the second reads it."""


def norm_graphs(optimizer: Optimizer, whole: Sequence[Segment]) -> NormGraphs:
    """The graphs of a rule whose segments are `whole` tensors.

    Raises
    ------
    UserError
        The rule combines elements of a tensor otherwise than by `Builder.square_sum`.
    """
    if optimizer.name == "lamb":
        return NormGraphs(
            partial(lamb_shares.change_graph, optimizer), lamb_shares.apply_graph, ("weights", "changes"), True
        )
    first = [
        Piece(segment.start, segment.stop, segment.weight_decay, number) for number, segment in enumerate(whole[:1])
    ]
    count = len(_Update(optimizer, first).sums)
    return NormGraphs(partial(_first, optimizer), partial(_second, optimizer), tuple(_norm(k) for k in range(count)))


def _norm(number: int) -> str:
    return f"square_sums.{number}"


def _first(optimizer: Optimizer, pieces: Sequence[Piece]) -> onnx.ModelProto:
    update = _Update(optimizer, pieces)
    model = update.build.model()
    graph = model.graph
    del graph.output[:]
    for number, values in enumerate(update.sums):
        graph.node.append(helper.make_node("Concat", values, [_norm(number)], axis=0))
        graph.output.append(helper.make_tensor_value_info(_norm(number), TensorProto.DOUBLE, [len(pieces)]))
    prune(graph)
    drop_unread_inputs(graph)
    if any(node.domain for node in graph.node):
        # Adam's operator writes over the moments that it reads.
        raise _refusal(optimizer, "the norm of what another operator than ONNX's computes")
    return model


def _second(optimizer: Optimizer, pieces: Sequence[Piece], tensors: int) -> onnx.ModelProto:
    update = _Update(optimizer, pieces)
    model = update.build.model()
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    places = "pieces"
    graph.initializer.append(numpy_helper.from_array(np.array([piece.number for piece in pieces]), places))
    for number, values in enumerate(update.sums):
        graph.input.append(helper.make_tensor_value_info(_norm(number), TensorProto.DOUBLE, [tensors]))
        # One Gather: ONNX Runtime 1.19.2 makes a Split of several, and gives two of them the same name.
        local = f"{_norm(number)}.here"
        nodes.append(helper.make_node("Gather", [_norm(number), places], [local], axis=0))
        nodes.append(helper.make_node("Split", [local], values, axis=0, num_outputs=len(pieces)))
    sums = {name for values in update.sums for name in values}
    replace(graph.node, [*nodes, *(node for node in graph.node if sums.isdisjoint(node.output))])
    prune(graph)
    drop_unread_inputs(graph)
    return model


class _Update:
    """A rule's update of pieces, and the sums of squares that it reads.

    Attributes
    ----------
    build
        The graph.
    sums
        For each norm that the rule takes of a tensor, its value for each piece.
    """

    def __init__(self, optimizer: Optimizer, pieces: Sequence[Piece]) -> None:
        self._optimizer = optimizer
        self.build: Builder = update_of(optimizer, pieces)
        self._owners = self._pieces_of_values()
        by_piece: list[list[str]] = [[] for _ in pieces]
        for value, argument in self.build.square_sums.items():
            by_piece[self._owner(argument)].append(value)
        if len({len(values) for values in by_piece}) > 1:
            raise _refusal(optimizer, "other norms of one tensor than of another")
        self.sums = [list(values) for values in zip(*by_piece, strict=True)]
        for argument in self.build.square_sums.values():
            nodes = needed_by(self.build.graph.node, {argument})
            if any(not self.build.square_sums.keys().isdisjoint(self.build.graph.node[i].output) for i in nodes):
                raise _refusal(optimizer, "a norm of what depends on another norm")

    def _owner(self, value: str) -> int:
        owners = self._owners.get(value, set())
        if len(owners) != 1:
            raise _refusal(self._optimizer, "a norm over several tensors")
        return next(iter(owners))

    def _pieces_of_values(self) -> dict[str, set[int]]:
        """The pieces whose elements a value has; values that have none are left out."""
        graph, owners = self.build.graph, dict[str, set[int]]()
        for value in graph.input:
            _, _, number = value.name.rpartition(".")
            if number.isdigit():
                owners[value.name] = {int(number)}
        inner = self._nodes_of_sums()
        for place, node in enumerate(graph.node):
            read = set().union(*(owners.get(name, set()) for name in walk.inputs(node)))
            if not read or place in inner:
                continue
            adam = (node.op_type, node.domain) == ("AdamOptimizer", MICROSOFT)
            if not adam and (node.op_type not in ELEMENTWISE or node.domain):
                raise _refusal(self._optimizer, f"whole tensors by {node.op_type}")
            owners.update(dict.fromkeys(node.output, read))
        return owners

    def _nodes_of_sums(self) -> set[int]:
        """Places of the nodes of `Builder.square_sum`."""
        makers = {name: place for place, node in enumerate(self.build.graph.node) for name in node.output}
        inner: set[int] = set()
        for value, argument in self.build.square_sums.items():
            names = [value]
            while names:
                name = names.pop()
                if name != argument and name in makers and makers[name] not in inner:
                    inner.add(makers[name])
                    names += walk.inputs(self.build.graph.node[makers[name]])
        return inner


def _refusal(optimizer: Optimizer, reads: str) -> UserError:
    return UserError(
        f"{optimizer.name} reads {reads}, which is not divided over ranks",
        where="train.optimizer",
        fix="train it without parallel.zero and in an undivided model, or use another optimizer",
    )
