"""Parameters in 16 bits that the optimizer's update writes, in place of a Cast of each in every micro-batch. Pure.

A half-precision training graph rounds the parameters that its products read. The trainer of an undivided run
(`ortflow.workflow.trainer.rounded`) keeps them rounded in one flat buffer instead. Parameters stay fp32.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.ir.edit import attributes_of, described, replace
from ortflow.workflow.graph.ir.order import drop_unread_inputs
from ortflow.workflow.graph.rules.precision import HALVES

ROUNDED = "rounded."
"""Beginning of the names of an update's outputs, which the number of the segment follows."""
_PARAMETERS = "parameters."


def reading_rounded(
    model: onnx.ModelProto, parameters: Collection[str], kinds: Collection[int] = HALVES
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of a training graph with an input in place of each Cast of a parameter to 16 bits, and whose they are.

    The inputs have the names of the values that the Casts computed. Graph outputs keep their Casts, and so do values of
    other element types than `kinds`.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    descriptions, outputs = described(graph), {value.name for value in graph.output}
    # 76 of them in GPT-2: 293 us of kernels and 99 of gaps a step at micro-batch 8 on an H200, where the update takes
    # about 60 more to write them (docs/benchmarks.md).
    casts = {
        str(node.output[0]): node
        for node in graph.node
        if node.op_type == "Cast" and not node.domain and node.input[0] in parameters
        and attributes_of(node)["to"] in kinds and node.output[0] not in outputs
    }  # fmt: skip
    sources = {name: str(node.input[0]) for name, node in casts.items()}
    for name, node in casts.items():
        value = graph.input.add()
        value.CopyFrom(descriptions[sources[name]])
        value.name, value.type.tensor_type.elem_type = name, attributes_of(node)["to"]
    replace(graph.node, [node for node in graph.node if node.output[0] not in casts])
    replace(graph.value_info, [value for value in graph.value_info if value.name not in casts])
    drop_unread_inputs(graph)
    return copy, sources


def writing_rounded(model: onnx.ModelProto, kind: int) -> onnx.ModelProto:
    """A copy of an optimizer's graph that also rounds each `parameters.I.out`, to `rounded.I` of the type `kind`."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    for value in list(graph.output):
        number = value.name.removeprefix(_PARAMETERS).removesuffix(".out")
        if value.name != f"{_PARAMETERS}{number}.out":
            continue
        name = ROUNDED + number
        graph.node.append(helper.make_node("Cast", [value.name], [name], name, to=kind))
        output = graph.output.add()
        output.CopyFrom(value)
        output.name, output.type.tensor_type.elem_type = name, kind
    return copy


def rounding(kind: int) -> onnx.ModelProto:
    """The graph `parameters` fp32 [n] -> `rounded` [n] of the element type `kind`."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Cast", ["parameters"], ["rounded"], "rounded", to=kind)],
        "rounded",
        [info("parameters", TensorProto.FLOAT, ["n"])],
        [info("rounded", kind, ["n"])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
