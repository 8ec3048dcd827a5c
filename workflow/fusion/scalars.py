"""Computes with single numbers in one kernel: what scales a gradient, and an optimizer's corrections of its bias. Pure.

Each of these nodes would be a kernel of one thread, which a GPU takes longer to start than to run. Called by step
`configure` for the graphs of scaling and update, on GPUs. The bits are those of ONNX Runtime's kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import constants_of, described, dims_of, import_domain, replace
from ortflow.workflow.graph.ir.order import prune, sort_nodes
from ortflow.workflow.graph.memory.element_types import element_types
from ortflow.workflow.optim.copies import copies_of

OPERATOR = "Scalars"
FEWEST = 3
"""Number of nodes from which one kernel replaces them."""
_INPUTS = 60
"""Values that operators.c passes, at most."""
_OUTPUTS = 6
_TYPES = {
    TensorProto.FLOAT: "float", TensorProto.DOUBLE: "double", TensorProto.INT64: "long long", TensorProto.BOOL: "bool"
}  # fmt: skip
_FORMS = {
    "Add": "{0} + {1}",
    "And": "{0} && {1}",
    "Cast": "({type}){0}",
    "Div": "{0} / {1}",
    "Equal": "{0} == {1}",
    "Greater": "{0} > {1}",
    "Less": "{0} < {1}",
    # ONNX Runtime's Min and Max hand on a NaN (`_Min` in cu_inc/common.cuh); C's fmin drops it.
    "Min": "{0} != {0} ? {0} : {1} != {1} ? {1} : {0} < {1} ? {0} : {1}",
    "Mul": "{0} * {1}",
    "Neg": "-{0}",
    "Not": "!{0}",
    "Or": "{0} || {1}",
    "Pow": "pow({0}, {1})",
    "Sqrt": "sqrt({0})",
    "Sub": "{0} - {1}",
    "Where": "{0} ? {1} : {2}",
}
_REAL = {"Div", "Min", "Pow", "Sqrt"}
"""Of floating-point numbers alone: integers differ in ONNX Runtime and C."""
_COUNTS = {"Where": 3, "Cast": 1, "Neg": 1, "Not": 1, "Sqrt": 1}


def scalars_in_one(model: onnx.ModelProto) -> tuple[onnx.ModelProto, int]:
    """A copy in which nodes that compute single numbers from such are one node, and the number of these nodes.

    Left out are those that depend on one of the others through a node that is not among them.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    sort_nodes(copy.graph)
    finder = _Finder(copy)
    # In GPT-2's update 41 kernels less, which took 47 us on an H200, and as many gaps (docs/benchmarks.md).
    if len(finder.members) < FEWEST or len(finder.inputs) > _INPUTS or len(finder.outputs) > _OUTPUTS:
        return copy, 0
    descriptions = described(copy.graph)
    members = {id(node) for node in finder.members}
    kernel_node = helper.make_node(
        OPERATOR, finder.inputs, finder.outputs, f"{finder.outputs[0]}/scalars", domain=CUDA_DOMAIN,
        source=finder.source(), ranks=[finder.ranks[name] for name in finder.outputs],
    )  # fmt: skip
    for name in finder.outputs:
        if name not in descriptions:
            dims = [1] * finder.ranks[name]
            copy.graph.value_info.append(helper.make_tensor_value_info(name, finder.types[name], dims))
    remaining = [
        onnx.NodeProto.FromString(original.SerializeToString())
        for original in copy.graph.node
        if id(original) not in members
    ]
    replace(copy.graph.node, [*remaining, kernel_node])
    sort_nodes(copy.graph)
    prune(copy.graph)
    import_domain(copy, CUDA_DOMAIN)
    return copy, len(finder.members)


class _Finder:
    """Finds the nodes, and what they read and make."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.types = element_types(model)
        self._constants = constants_of(model.graph)
        self.ranks = {
            name: len(dims) for name, value in described(model.graph).items()
            if (dims := dims_of(value)) is not None and all(size == 1 for size in dims)
        }  # fmt: skip
        self.ranks |= {name: array.ndim for name, array in self._constants.items() if array.size == 1}
        # Node objects of protobuf's lists are made anew at each access: these keep their identity.
        nodes = list(model.graph.node)
        self._aliases = copies_of(model.graph, self.ranks)
        self.members: list[onnx.NodeProto] = []
        inside: set[str] = set()
        behind: set[str] = set()
        for node in nodes:
            read = [self._aliases.get(name, name) for name in node.input]
            if not behind.intersection(read) and self._fits(node, read):
                self.members.append(node)
                self.ranks[node.output[0]] = max(self.ranks[name] for name in read)
                inside.add(node.output[0])
            elif behind.union(inside).intersection(read):
                behind.update(node.output)
        reads = {self._aliases.get(name, name): None for node in self.members for name in node.input}
        self.inputs = [name for name in reads if name not in inside and name not in self._constants]
        member_ids = {id(node) for node in self.members}
        outside_reads = {name for node in nodes if id(node) not in member_ids for name in node.input}
        outside_reads |= {value.name for value in model.graph.output}
        self.outputs = [node.output[0] for node in self.members if node.output[0] in outside_reads]

    def _fits(self, node: onnx.NodeProto, read: Sequence[str]) -> bool:
        if node.domain or node.op_type not in _FORMS or len(node.output) != 1:
            return False
        if len(read) != _COUNTS.get(node.op_type, 2) or not all(name in self.ranks for name in read):
            return False
        kinds = [self.types.get(name, TensorProto.UNDEFINED) for name in (*read, node.output[0])]
        if node.op_type in _REAL and not {TensorProto.FLOAT, TensorProto.DOUBLE}.issuperset(kinds):
            return False
        # Only equal types: a power of fp32 has other bits in C.
        if node.op_type == "Pow" and set(kinds) != {TensorProto.DOUBLE}:
            return False
        return all(kind in _TYPES for kind in kinds)

    def source(self) -> str:
        """The kernel: pointers to the inputs, then to the outputs."""
        names = {name: f"*i{place}" for place, name in enumerate(self.inputs)}
        lines = []
        for number, node in enumerate(self.members):
            read = [self._aliases.get(name, name) for name in node.input]
            arguments = [names[name] if name in names else literal(self._constants[name]) for name in read]
            kind = _TYPES[self.types[node.output[0]]]
            lines.append(f"const {kind} v{number} = {_FORMS[node.op_type].format(*arguments, type=kind)};")
            names[node.output[0]] = f"v{number}"
        lines += [f"*o{place} = {names[name]};" for place, name in enumerate(self.outputs)]
        arguments = [f"const {_TYPES[self.types[name]]} *i{place}" for place, name in enumerate(self.inputs)]
        results = [f"{_TYPES[self.types[name]]} *o{place}" for place, name in enumerate(self.outputs)]
        body = "".join(f"    {line}\n" for line in lines)
        return f'extern "C" __global__ void scalars({", ".join([*arguments, *results])}) {{\n{body}}}\n'


def literal(value: np.ndarray[Any, Any]) -> str:
    """A number to the bit."""
    (number,) = value.reshape(-1).tolist()
    if value.dtype == np.float32:
        return f"__int_as_float(0x{struct.unpack('<I', struct.pack('<f', number))[0]:08x})"
    if value.dtype == np.float64:
        return f"__longlong_as_double(0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016x}ll)"
    return f"{int(number)}ll" if value.dtype != np.bool_ else str(bool(number)).lower()
