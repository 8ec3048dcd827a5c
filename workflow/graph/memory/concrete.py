"""The type and shape of every value of a graph for a batch of given shapes, node by node. Pure.

Extends onnx's inference: follows sizes that nodes compute, and knows the operators of ONNX Runtime and of ortflow by
their rules. Unknown values are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.shapes import LARGE
from ortflow.workflow.graph.memory.branches import branches_of, conditions_of
from ortflow.workflow.graph.memory.peak_memory import BYTES, axes_of, length
from ortflow.workflow.graph.operators.families import SIZES, Trait, having
from ortflow.workflow.graph.rules.size import Type

HALF = ".half"
"""Suffix of the name of a value that is stored in half precision."""
_COMPUTED = having(Trait.GIVES_SIZES)


def concrete(
    model: onnx.ModelProto, batch: Mapping[str, Sequence[int]], types: Mapping[str, Type] | None = None
) -> dict[str, Type]:
    """Infer types and shapes.

    Parameters
    ----------
    model
        The graph.
    batch
        Shapes of the inputs that vary.
    types
        Shapes of values that the graph shares with another one. Types are the graph's own where it declares them.

    Returns
    -------
    dict
        Value name -> (element type, shape).
    """
    return followed(model, batch, types)[0]


def followed(
    model: onnx.ModelProto, batch: Mapping[str, Sequence[int]], types: Mapping[str, Type] | None = None
) -> tuple[dict[str, Type], dict[str, npt.NDArray[Any]]]:
    """As `concrete`, and the values of sizes and of what is computed of them."""
    graph = model.graph
    inference = _Inference(model, axes_of(graph, batch), types or {})
    for value in graph.input:
        inference.describe(value, batch.get(value.name))
    inference.follow_all(graph)
    return inference.types, inference.values


class _Inference:
    """The types, shapes and elements found so far."""

    def __init__(self, model: onnx.ModelProto, axes: Mapping[str, int], types: Mapping[str, Type]) -> None:
        self.types: dict[str, Type] = {}
        self._known = types
        self.values: dict[str, npt.NDArray[Any]] = {}
        self._axes, self._imports, self._version = axes, list(model.opset_import), model.ir_version
        self._opset = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)
        self._declared = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}

    def describe(self, value: onnx.ValueInfoProto, shape: Sequence[int] | None = None) -> None:
        """Take over the graph's description of a value, with free axes replaced by their length."""
        kind = value.type.tensor_type
        if shape is None:
            if not kind.HasField("shape"):
                return
            lengths = [
                dim.dim_value if dim.HasField("dim_value") else length(dim.dim_param, self._axes)
                for dim in kind.shape.dim
            ]
            if any(size is None for size in lengths):
                return
            shape = [size or 0 for size in lengths]
        self.types[value.name] = (kind.elem_type, tuple(shape))

    def follow_all(self, graph: onnx.GraphProto) -> None:
        """Follow the constants and nodes of a graph."""
        for tensor in graph.initializer:
            self.types[tensor.name] = (tensor.data_type, tuple(tensor.dims))
            if np.prod(tensor.dims, dtype=np.int64) <= LARGE and tensor.data_location != TensorProto.EXTERNAL:
                self.values[tensor.name] = numpy_helper.to_array(tensor)
        for node in graph.node:
            self.follow(node)

    def follow(self, node: onnx.NodeProto) -> None:
        """Add the types of a node's outputs, and their elements if they are sizes."""
        own_domain = bool(node.domain) and node.domain != "ai.onnx"
        if walk.is_if(node):
            self._branched(node)
        elif not own_domain:
            self._inferred(node)
            self._computed(node)
        for place, name in enumerate(node.output):
            if not name or name in self.types:
                continue
            if name in self._declared:
                self.describe(self._declared[name])
            if (name not in self.types and (shared_type := self._shared(name)) is not None) or (
                own_domain and name not in self.types and (shared_type := _by_rule(node, place, self.types)) is not None
            ):
                self.types[name] = shared_type

    def _shared(self, name: str) -> Type | None:
        """Type of a value in the other graph. In half precision, the value has another name (`fusion.half`)."""
        shared_type = self._known.get(name) or self._known.get(name.removesuffix(HALF))
        if shared_type is None:
            return None
        declared = self._declared[name].type.tensor_type.elem_type if name in self._declared else 0
        return declared or (TensorProto.FLOAT16 if name not in self._known else shared_type[0]), shared_type[1]

    def _branched(self, node: onnx.NodeProto) -> None:
        """Follow the branches of an If. Where they differ and either may be taken, a result has the larger size."""
        branches = list(branches_of(node, conditions_of(self.values)))
        for branch in branches:
            self._declared.update({value.name: value for value in (*branch.value_info, *branch.output)})
            self.follow_all(branch)
        for name, *results in zip(node.output, *(branch.output for branch in branches), strict=False):
            types = [self.types[result.name] for result in results if result.name in self.types]
            if types and len(types) == len(branches):
                self.types[name] = max(types, key=lambda kind: math.prod(kind[1]) * BYTES.get(kind[0], 0))
            if len(branches) == 1 and results[0].name in self.values:
                self.values[name] = self.values[results[0].name]

    def _inferred(self, node: onnx.NodeProto) -> None:
        names = [name for name in node.input if name]
        if any(name not in self.types for name in names):
            return
        kinds = {name: helper.make_tensor_type_proto(*self.types[name]) for name in names}
        data = {name: numpy_helper.from_array(self.values[name], name) for name in names if name in self.values}
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opset, "")
            outputs = shape_inference.infer_node_outputs(
                schema, node, kinds, data, opset_imports=self._imports, ir_version=self._version
            )
        except (shape_inference.InferenceError, onnx.defs.SchemaError, RuntimeError, ValueError, KeyError):
            return
        for name, kind in outputs.items():
            tensor = kind.tensor_type
            if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
                self.types[name] = (tensor.elem_type, tuple(dim.dim_value for dim in tensor.shape.dim))

    def _computed(self, node: onnx.NodeProto) -> None:
        if node.op_type in ("Shape", "Size"):
            if node.input[0] in self.types:
                self.values[node.output[0]] = self._size(node)
                self._note(node.output[0])
            return
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    self.values[node.output[0]] = numpy_helper.to_array(attribute.t)
                    self._note(node.output[0])
            return
        names = [name for name in node.input if name]
        if node.op_type not in _COMPUTED or any(name not in self.values for name in names):
            return
        if any(np.prod(self.types[name][1]) > LARGE for name in node.output if name in self.types):
            return
        from onnx.reference import ReferenceEvaluator

        graph = helper.make_graph(
            [node], "node", [helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(names)],
            [helper.make_empty_tensor_value_info(name) for name in node.output if name],
        )  # fmt: skip
        single = helper.make_model(graph, opset_imports=self._imports, ir_version=self._version)
        try:
            results = ReferenceEvaluator(single).run(None, {name: self.values[name] for name in names})
        except Exception:  # noqa: BLE001
            # The evaluator passes on numpy's exceptions; the value then stays unknown.
            return
        for name, result in zip(filter(None, node.output), results, strict=True):
            self.values[name] = np.asarray(result)
            self._note(name)

    def _note(self, name: str) -> None:
        value = self.values[name]
        self.types[name] = (helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)

    def _size(self, node: onnx.NodeProto) -> npt.NDArray[Any]:
        shape = self.types[node.input[0]][1]
        if node.op_type == "Size":
            return np.array(np.prod(shape, dtype=np.int64), np.int64)
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], np.int64)


def _by_rule(node: onnx.NodeProto, place: int, types: Mapping[str, Type]) -> Type | None:
    rule = SIZES.get(node.op_type)
    return None if rule is None else rule(node, place, types)
