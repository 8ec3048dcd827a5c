"""What the ranks of a pipeline know of its stages: values that pass between them, weights, and costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import onnx

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.stages.costs import Costs
from ortflow.workflow.graph.stages.cut import STATISTIC, WHERE, assign
from ortflow.workflow.graph.stages.derivative import Derivative
from ortflow.workflow.graph.stages.pieces import Piece
from ortflow.workflow.parallel.stage import Cost, Stage, StageSet, Value


def described(
    pieces: Sequence[Piece],
    eval_pieces: Sequence[Piece],
    derivatives: Sequence[Derivative],
    of: tuple[dict[str, onnx.TypeProto], dict[str, onnx.TypeProto]],
    weights: Collection[str],
) -> tuple[Stage, ...]:
    """What ranks know of the stages; `of` are the types of values in training and in evaluation."""
    types, eval_types = of
    stages: list[Stage] = []
    behind: tuple[str, ...] = ()
    for number in reversed(range(len(pieces))):
        piece, other, derivative = pieces[number], eval_pieces[number], derivatives[number]
        stages.insert(
            0,
            Stage(
                number=number,
                receives=_values(piece.receives, types, derivative.received),
                sends=_values(piece.sends, types, behind),
                passed=piece.passed,
                eval_receives=_values(other.receives, eval_types, ()),
                eval_sends=_values(other.sends, eval_types, ()),
                eval_passed=other.passed,
                batch=tuple(dict.fromkeys((*piece.batch, *other.batch))),
                tensors=tuple(name for name in weights if name in piece.weights or name in other.weights),
                trained=derivative.trained,
                dropouts=piece.dropouts,
            ),
        )
        behind = derivative.received
    return tuple(stages)


def with_costs(
    stages: Sequence[Stage],
    graph: onnx.GraphProto,
    cuts: Sequence[Sequence[str]],
    weights: Collection[str],
    costs: Costs,
    seconds: Callable[[onnx.NodeProto], float] | None,
) -> tuple[Stage, ...]:
    """The stages of a forward graph with the costs of their nodes."""
    result = []
    for stage, places in zip(stages, assign(graph, cuts, weights).stages, strict=True):
        nodes = [graph.node[place] for place in sorted(places)]
        duration = None if seconds is None else sum(map(seconds, nodes))
        sent = sum(costs.bytes(value.name) for value in stage.sends)
        result.append(replace(stage, cost=Cost(sum(map(costs.operations, nodes)), duration, sent)))
    return tuple(result)


def check_statistics(prepared: onnx.GraphProto, division: StageSet) -> None:
    """Only one rank of a pipeline moves a running statistic: no other may evaluate with it."""
    moving = {value.name.removesuffix(STATISTIC) for value in prepared.output if value.name.endswith(STATISTIC)}
    for name, ranks in division.holders().items():
        if name in moving and len(ranks) > 1:
            raise UserError(
                f"the ranks {ranks[0]} and {ranks[1]} of a pipeline both use the running statistic {name!r}, one in "
                "training and the other in evaluation",
                where=WHERE,
                fix="cut the model where its layers are not in two stages",
            )


def _values(names: Sequence[str], types: dict[str, onnx.TypeProto], gradients: Collection[str]) -> tuple[Value, ...]:
    def dtype(name: str) -> str:
        return str(onnx.helper.tensor_dtype_to_np_dtype(shapes.element_type(types, name)).name)

    return tuple(Value(name, dtype(name), name in gradients) for name in names)


def notes_on(cuts: Sequence[Sequence[str]], division: StageSet) -> list[str]:
    """Lines for the log: where each stage ends, and what it costs."""
    lines = [f"stage {number} ends with {', '.join(cut)}" for number, cut in enumerate(cuts)]
    costs = [stage.cost for stage in division.stages if stage.cost is not None]
    operations = max(1, sum(cost.operations for cost in costs))
    for number, cost in enumerate(costs):
        share = f"{cost.operations / operations:.0%} of the counted operations"
        part = share if cost.seconds is None else f"{1e3 * cost.seconds:.3g} ms measured, {share}"
        sent = f"; {cost.sent:,} bytes go to the next stage" if number < len(costs) - 1 else ""
        lines.append(f"stage {number} in a forward pass of a micro-batch: {part}{sent}")
    for name, ranks in division.holders().items():
        if len(ranks) > 1:
            lines.append(f"{name} is held by the ranks {', '.join(map(str, ranks))} of each pipeline")
    return lines
