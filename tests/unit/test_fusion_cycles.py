"""Groups of elementwise nodes, joined as long as no path leads from one through another node back: whole graphs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.fusion.contraction import Contraction
from ortflow.workflow.fusion.groups import fuse, fused, groups_of
from ortflow.workflow.graph.ir.order import sort_nodes
from ortflow.workflow.graph.ir.passes import Pass, Passes, outputs_without_nodes
from ortflow.workflow.graph.memory.element_types import element_types

SHAPES = ([4, 6], [3, 4, 6], [6])
ELEMENTWISE = ("Add", "Mul", "Sub", "Max")


def random_model(seed: int) -> onnx.ModelProto:
    """Elementwise nodes of several shapes, and nodes of other kinds between them, in an order of its own.

    Half of the nodes read values of long ago, as a backward pass reads those of the forward pass.
    """
    random = np.random.default_rng(seed)
    value = helper.make_tensor_value_info
    shapes = {f"x{number}": list(shape) for number, shape in enumerate(SHAPES)}
    inputs = [value(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    nodes: list[onnx.NodeProto] = []
    for number in range(int(random.integers(10, 60))):
        names, out = [*shapes], f"v{number}"
        recent = names[-6:] if random.random() < 0.5 else names
        first, second = random.choice(recent), random.choice(names)
        ranks = len(shapes[first]), len(shapes[second])
        if random.random() < 0.25:
            nodes.append(helper.make_node("Softmax", [first], [out]))
            shapes[out] = shapes[first]
        elif random.random() < 0.15:
            # A value of another shape: its readers are in other groups.
            nodes.append(helper.make_node("ReduceSum", [first, "first_axis"], [out], keepdims=0))
            shapes[out] = shapes[first][1:] if ranks[0] > 1 else []
        else:
            nodes.append(helper.make_node(str(random.choice(ELEMENTWISE)), [first, second], [out]))
            shapes[out] = max(shapes[first], shapes[second], key=len)
    read = {name for node in nodes for name in node.input}
    outputs = [node.output[0] for node in nodes if node.output[0] not in read or random.random() < 0.1]
    graph = helper.make_graph(
        nodes,
        "random",
        inputs,
        [value(name, TensorProto.FLOAT, shapes[name]) for name in outputs],
        [helper.make_tensor("first_axis", TensorProto.INT64, [1], [0])],
        value_info=[
            value(n, TensorProto.FLOAT, s) for n, s in shapes.items() if n.startswith("v") and n not in outputs
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize("first", range(0, 240, 80))
def test_random_graphs_stay_whole(first: int) -> None:
    """coat's parallel blocks of timm lost every output: a group reached back behind the nodes that it joined."""
    for seed in range(first, first + 80):
        model = random_model(seed)
        made, taken = fuse(model)
        assert not outputs_without_nodes(made.graph), seed
        onnx.checker.check_model(made)
        before: set[str] = {"", *(v.name for v in made.graph.input), *(t.name for t in made.graph.initializer)}
        for node in made.graph.node:
            assert before.issuperset(node.input), (seed, node.name)
            before.update(node.output)
        groups = [group for group in groups_of(model, element_types(model)) if len(group.members) > 1]
        assert taken == sum(len(group.members) for group in groups)


def test_neighbours_are_joined_where_nothing_forbids_it() -> None:
    """Every pair of neighbouring groups of one shape is apart because it encloses another node."""
    joined = 0
    for seed in range(60):
        model = random_model(seed)
        joined += fuse(model)[1]
    assert joined > 500


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_joins_are_those_of_the_whole_graph(data: st.DataObject) -> None:
    """`encloses` is what a search of all paths says, and the order stays topological."""
    count = data.draw(st.integers(2, 14))
    before = [
        set(data.draw(st.lists(st.integers(0, place - 1), max_size=3))) if place else set() for place in range(count)
    ]
    contraction, groups = Contraction(before), {place: {place} for place in range(count)}

    def edges() -> dict[int, set[int]]:
        """The number of each group -> those it reads from."""
        number = {id(group): min(group) for group in groups.values()}
        reads: dict[int, set[int]] = {at: set() for at in number.values()}
        for place in range(count):
            own = number[id(groups[place])]
            reads[own] |= {number[id(groups[earlier])] for earlier in before[place]} - {own}
        return reads

    def reaches(reads: dict[int, set[int]], start: int, goal: int) -> bool:
        waiting, seen = [start], set[int]()
        while waiting:
            at = waiting.pop()
            if at == goal:
                return True
            waiting += reads[at] - seen
            seen |= reads[at]
        return False

    for last in range(count):
        for first in sorted(before[last]):
            one, other = groups[first], groups[last]
            if one is other:
                continue
            reads = edges()
            through = reads[min(other)] - {min(one)}
            expected = any(reaches(reads, at, min(one)) for at in through)
            assert contraction.encloses(first, last) is expected
            if expected:
                with pytest.raises(ValueError, match="a path leads"):
                    contraction.join(first, last)
            elif data.draw(st.booleans()):
                contraction.join(first, last)
                together = one | other
                groups |= dict.fromkeys(together, together)


def test_the_pass_that_loses_an_output_is_named() -> None:
    model = random_model(1)
    lost = model.graph.output[0].name

    def loses_one(given: onnx.ModelProto) -> onnx.ModelProto:
        made = onnx.ModelProto.FromString(given.SerializeToString())
        for node in made.graph.node:
            node.output[:] = ["elsewhere" if name == lost else name for name in node.output]
        return made

    def turns_back(given: onnx.ModelProto) -> onnx.ModelProto:
        made = onnx.ModelProto.FromString(given.SerializeToString())
        made.graph.node[0].input[0] = made.graph.node[0].output[0]
        sort_nodes(made.graph)
        return made

    def refuses(given: onnx.ModelProto) -> onnx.ModelProto:
        raise UserError("no gradient", where="model")

    def applied(model: onnx.ModelProto, *changes: Callable[[onnx.ModelProto], onnx.ModelProto]) -> onnx.ModelProto:
        passes = [
            Pass[object](change.__name__, lambda model, _, change=change: change(model), "") for change in changes
        ]
        return Passes("", tuple(passes)).run(model, None)

    assert applied(model, fused).graph.output == model.graph.output
    with pytest.raises(OrtflowError, match=f"not whole after 'loses_one', .*: output '{lost}' of the graph"):
        applied(model, fused, loses_one, fused)
    with pytest.raises(OrtflowError, match=r"not whole after 'turns_back', .* waits for a value"):
        applied(model, turns_back)
    with pytest.raises(UserError, match=r"^model: no gradient$"):
        applied(model, refuses)
