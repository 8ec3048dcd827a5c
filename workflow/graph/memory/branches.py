"""The branches of an If, as `peak_memory` and `concrete` follow them: under names that no other graph has. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy.typing as npt
import onnx

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import rename_values


def branches_of(node: onnx.NodeProto, conditions: Mapping[str, bool]) -> Iterator[onnx.GraphProto]:
    """Copies of the branches that an If may take, one if its condition is known; none for another node.

    Their values are called `result/branch/value` after the first result of the If: ONNX allows two branches the same
    names.
    """
    if not walk.is_if(node):
        return
    graphs = {attribute.name: attribute.g for attribute in node.attribute if attribute.HasField("g")}
    condition = conditions.get(node.input[0])
    names = ("then_branch", "else_branch") if condition is None else ("then_branch" if condition else "else_branch",)
    for name in names:
        if name in graphs:
            yield _renamed(graphs[name], f"{node.output[0]}/{name}/")


def conditions_of(values: Mapping[str, npt.NDArray[Any]]) -> dict[str, bool]:
    """The known values that may be the condition of an If."""
    return {name: bool(value.item()) for name, value in values.items() if value.dtype == bool and value.size == 1}


def _renamed(graph: onnx.GraphProto, prefix: str) -> onnx.GraphProto:
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    inner_names = {str(name) for node in copy.node for name in node.output if name}
    inner_names |= {str(tensor.name) for tensor in copy.initializer}
    names = {name: prefix + name for name in inner_names}
    for node in copy.node:
        rename_values(node, names)
    for value in (*copy.output, *copy.value_info, *copy.initializer):
        value.name = names.get(value.name, value.name)
    return copy
