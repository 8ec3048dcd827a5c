"""Bounds the size of a model's values by arithmetic on shapes, before anything is computed.

Called by `prepare` before and after shape inference, and by `assembly` before ONNX Runtime, which computes every
constant expression when it opens a session. A file of a few kilobytes can demand any amount of memory; such a file is
rejected here. This module itself never creates a value of more than SMALL elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import onnx
import psutil
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.tensors import FLOATS, ITEM_BYTES, RANK, check_rank
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.node_value import value_of

LARGEST = 256 << 20
"""Largest value that is computed from constants alone, in bytes."""
TOTAL = 1 << 30
"""Largest total of these, in bytes."""
SHARE = 16
"""The total may also be this multiple of the size of the constants in the file."""
MEMORY = 64 << 30
"""Largest value that depends on data, in bytes; a machine with less memory may still check the model."""
SMALL = 4096
"""Largest constant, in elements, whose values are evaluated: it may be a shape."""

_EVALUATED = frozenset(
    (
        "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Constant", "ConstantOfShape",
        "CumSum", "Div", "Equal", "Exp", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND",
        "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mod", "Mul",
        "Neg", "NonZero", "Not", "Or", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin",
        "ReduceProd", "ReduceSum", "Reshape", "Round", "ScatterElements", "ScatterND", "Shape", "Sign", "Size",
        "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tile", "Transpose", "Trilu", "Unique", "Unsqueeze",
        "Where", "Xor"
    )
)  # fmt: skip
"""Operators that are evaluated if their inputs and outputs are small."""
_OF_SHAPE = frozenset(["Shape", "Size"])
"""Those of them that do not read elements."""
_BOUNDED = frozenset(["Compress", "NonZero", "Unique"])
"""Those of them whose output is no larger than their input, though its size may be unknown."""
_GROWING = frozenset(
    (
        "AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "ConcatFromSequence", "ConstantOfShape",
        "ConvTranspose", "DFT", "Einsum", "Expand", "EyeLike", "GridSample", "HammingWindow", "HannWindow",
        "MaxUnpool", "MelWeightMatrix", "OneHot", "Pad", "Range", "RandomNormal", "RandomUniform", "Resize",
        "RoiAlign", "STFT", "Tile", "Upsample"
    )
)  # fmt: skip
"""Operators whose output may be much larger than their inputs, depending on the inputs' values."""
_AGAIN = "export the model without it, or make it an input"


def check_sizes(model: onnx.ModelProto, location: str) -> None:
    """Raises UserError naming the first node whose result is known to be too large.

    Values that depend on a floating-point tensor of more than SMALL elements count as data, since the tensor may be
    trained: only the machine's memory limits them.
    """
    _Sizes(model, location, only_constants=False, large_too=False).graph(model.graph, {})


def check_constants(model: onnx.ModelProto, location: str) -> None:
    """Same as `check_sizes`, for constants alone, in a graph whose parameters are inputs: every tensor is a constant.

    A constant whose size cannot be determined is rejected too.
    """
    _Sizes(model, location, only_constants=True, large_too=True).graph(model.graph, {})


def check_inferred(model: onnx.ModelProto, location: str) -> None:
    """Raises UserError if a value of the main graph is too large according to the shapes in the graph."""
    types = {value.name: value.type for part in (model.graph.value_info, model.graph.output) for value in part}
    limits = _Sizes(model, location, only_constants=False, large_too=False)
    scope = {t.name: _Value(None, cheap=math.prod(t.dims) <= SMALL) for t in model.graph.initializer}
    data = _Value(None)
    fitting: set[bytes] = set()
    for node in model.graph.node:
        closed = not node.attribute or not any(walk.subgraphs(node))
        cheap = closed and _is_cheap(node, [scope.get(name) for name in node.input if name])
        for name in node.output:
            if cheap:
                scope[name] = _Value(types.get(name), cheap=True)
                limits.check(node, scope[name])
                continue
            scope[name] = data
            # Most types of a large model are equal: each is checked once.
            content = types[name].SerializeToString(deterministic=True) if name in types else b""
            if content not in fitting:
                limits.check(node, _Value(types.get(name)))
                fitting.add(content)


@dataclass
class _Value:
    """What is known about a value."""

    type: onnx.TypeProto | None
    constant: bool = False
    cheap: bool = False
    """Depends only on constants and on shapes of data, so that few operators may enlarge it much."""
    array: np.ndarray | None = None
    """Its elements, if it is small, constant and was evaluated."""
    maker: onnx.NodeProto | None = None
    """For a constant: the node that computes it."""
    name: str = ""

    @property
    def dims(self) -> list[int | None] | None:
        """Its shape, with None for unknown sizes; None if the rank is unknown."""
        if self.type is None or not self.type.tensor_type.HasField("shape"):
            return None
        return [d.dim_value if d.HasField("dim_value") else None for d in self.type.tensor_type.shape.dim]

    @property
    def count(self) -> int | None:
        """Number of elements, None if unknown."""
        dims = self.dims
        return None if dims is None or None in dims else math.prod(d for d in dims if d is not None)


_Scope = dict[str, _Value]


class _Sizes:
    """One pass over a model: over its constants alone, or over every value, with tensors of any size as constants."""

    def __init__(self, model: onnx.ModelProto, location: str, *, only_constants: bool, large_too: bool) -> None:
        self._opsets, self._ir_version, self._where = model.opset_import, model.ir_version, location
        self._versions = {opset.domain: opset.version for opset in model.opset_import}
        self._only_constants, self._large_too = only_constants, large_too
        stored_bytes = (
            sum(_bytes(tensor.data_type, tensor.dims) for _, tensor in walk.all_tensors(model)) if large_too else 0
        )
        self._largest, self._total = max(LARGEST, stored_bytes), TOTAL + SHARE * stored_bytes
        self._memory = max(MEMORY, psutil.virtual_memory().total)
        self._computed = 0
        self._schemas: dict[tuple[str, str], defs.OpSchema | None] = {}
        self._inferred: dict[tuple[object, ...], list[onnx.TypeProto | None]] = {}
        """Of nodes that read no elements: operator, attributes and types of the inputs -> types of the outputs."""
        self._contents: dict[int, tuple[onnx.TypeProto, bytes]] = {}
        """Of types by their identity, with the type, whose identity another one could have otherwise."""
        self._fitting: dict[int, onnx.TypeProto] = {}
        """Types of data that have been checked, by their identity."""

    def graph(self, graph: onnx.GraphProto, outer: _Scope) -> None:
        """Visit the nodes of a graph in order; `outer` are the values of the enclosing graphs."""
        scope = dict(outer)
        for value in graph.input:
            scope[value.name] = _Value(value.type)
        for tensor in graph.initializer:
            scope[tensor.name] = self._held(tensor)
        for node in graph.node:
            self._node(node, scope)

    def _held(self, tensor: onnx.TensorProto) -> _Value:
        """A tensor in the file."""
        small = math.prod(tensor.dims) <= SMALL and tensor.data_type != TensorProto.STRING
        array = numpy_helper.to_array(tensor) if small else None
        type_ = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        constant = small or self._large_too or tensor.data_type not in FLOATS
        return _Value(type_, constant, constant, array)

    def _node(self, node: onnx.NodeProto, scope: _Scope) -> None:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            scope[node.output[0]] = self._held(node.attribute[0].t)
            return
        inner = list(walk.subgraphs(node)) if node.attribute else ()
        for graph in inner:
            self.graph(graph, scope)
        read = [scope.get(name) for name in node.input if name]
        constant = not inner and all(value is not None and value.constant for value in read)
        cheap = not inner and _is_cheap(node, read)
        if not constant and cheap and node.op_type in _OF_SHAPE:
            constant = read[0] is not None and read[0].count is not None
        if not constant and self._only_constants:
            return
        outputs = self._infer(node, scope)
        if constant and not all(value.count is not None for value in outputs.values()):
            for value in read:
                self._evaluate(value, scope)
            outputs = self._infer(node, scope)
        for name, value in outputs.items():
            value.name, value.cheap = name, cheap
            value.constant, value.maker = constant, node if constant else None
            self.check(node, value)
        scope.update(outputs)

    def _infer(self, node: onnx.NodeProto, scope: _Scope) -> _Scope:
        """Infer the types of a node's outputs; an output whose type cannot be inferred has none."""
        schema = self._schema(node)
        types: dict[str, onnx.TypeProto] = {}
        data = {}
        is_known = schema is not None and not (node.attribute and any(walk.subgraphs(node)))
        for name in node.input if is_known else ():
            value = scope.get(name)
            if value is not None and value.type is not None:
                types[name] = value.type
                if value.array is not None:
                    data[name] = numpy_helper.from_array(value.array)
            elif name:
                is_known = False
        if schema is None or not is_known:
            return {name: _Value(None) for name in node.output if name}
        if data:
            inferred = self._types(schema, node, types, data)
            return {name: _Value(inferred.get(name)) for name in (*filter(None, node.output), *inferred)}
        # Layers repeat: most nodes of a large model have an equal one before them.
        key = (
            node.op_type, node.domain,
            *[attribute.SerializeToString(deterministic=True) for attribute in node.attribute],
            None, *[self._content(types[name]) if name else None for name in node.input],
            None, *map(bool, node.output),
        )  # fmt: skip
        if key not in self._inferred:
            outputs = self._types(schema, node, types, {})
            self._inferred[key] = [outputs.get(name) for name in node.output]
        return {name: _Value(type_) for name, type_ in zip(node.output, self._inferred[key], strict=True) if name}

    def _content(self, value_type: onnx.TypeProto) -> bytes:
        """A type in bytes; nodes that are alike share the objects of their types."""
        entry = self._contents.get(id(value_type))
        if entry is None:
            entry = self._contents[id(value_type)] = (value_type, value_type.SerializeToString(deterministic=True))
        return entry[1]

    def _types(
        self,
        schema: defs.OpSchema,
        node: onnx.NodeProto,
        types: dict[str, onnx.TypeProto],
        data: dict[str, TensorProto],
    ) -> dict[str, onnx.TypeProto]:
        outputs: dict[str, onnx.TypeProto] = {}
        with suppress(Exception):  # the node is untrusted; errors in it are reported where it is used
            outputs = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=self._opsets, ir_version=self._ir_version
            )
        return outputs

    def _schema(self, node: onnx.NodeProto) -> defs.OpSchema | None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        key = (node.op_type, domain)
        if key not in self._schemas:
            version = self._versions.get(domain, self._versions.get("ai.onnx", 1))
            try:
                self._schemas[key] = defs.get_schema(node.op_type, version, domain)
            except defs.SchemaError:
                self._schemas[key] = None
        return self._schemas[key]

    def _evaluate(self, target: _Value | None, scope: _Scope) -> None:
        """Evaluate a small constant, and the constants that it is computed from."""
        open_values = [target]
        while open_values:
            value = open_values[-1]
            if value is None or value.array is not None or not _is_small(value):
                open_values.pop()
                continue
            node, value.maker = value.maker, None
            assert node is not None
            read = {name: scope[name] for name in node.input if name}
            if node.op_type in _OF_SHAPE:
                value.array = _of_shape(node, next(iter(read.values())))
            elif missing := [operand for operand in read.values() if operand.array is None and _is_small(operand)]:
                value.maker = node
                open_values += missing
            elif all(operand.array is not None for operand in read.values()):
                value.array = _computed(
                    node, value.name, {name: operand.array for name, operand in read.items()}, self._versions
                )

    def check(self, node: onnx.NodeProto, value: _Value) -> None:
        """Raises UserError if a value that the node makes is too large, or is a constant of unknown size."""
        if not value.constant and not value.cheap and id(value.type) in self._fitting:
            return
        dims = value.dims
        if dims is None or (value.constant and None in dims):
            if self._only_constants and (node.op_type in _GROWING or self._schema(node) is None):
                raise UserError(
                    f"{walk.called(node)} computes a constant whose size cannot be known before",
                    where=self._where,
                    fix=_AGAIN,
                )
            return
        if len(dims) > RANK:
            check_rank(len(dims), f"a value that {walk.called(node)} makes", self._where)
        assert value.type is not None
        size = _bytes(value.type.tensor_type.elem_type, [1 if d is None else d for d in dims])
        if value.constant:
            self._computed += size
        if size > (self._largest if value.cheap else self._memory):
            source = "from constants" if value.cheap else "from one sample"
            raise UserError(
                f"{walk.called(node)} makes a value of {size / 2**30:,.1f} GiB {source}", where=self._where, fix=_AGAIN
            )
        if self._computed > self._total:
            raise UserError(
                f"its nodes compute constants of more than {self._total / 2**30:.0f} GiB, up to {walk.called(node)}",
                where=self._where,
                fix=_AGAIN,
            )
        self._fitting[id(value.type)] = value.type


def _bytes(data_type: int, dims: Iterable[int]) -> int:
    return math.prod(dims) * ITEM_BYTES.get(data_type, 8)


def _is_cheap(node: onnx.NodeProto, read: Iterable[_Value | None]) -> bool:
    return node.op_type in _OF_SHAPE or all(value is not None and value.cheap for value in read)


def _is_small(value: _Value) -> bool:
    """Whether a constant is small enough to be evaluated."""
    node = value.maker
    if node is None or node.domain not in ("", "ai.onnx") or node.op_type not in _EVALUATED:
        return False
    return node.op_type in _BOUNDED or (value.count is not None and value.count <= SMALL)


def _of_shape(node: onnx.NodeProto, value: _Value) -> np.ndarray:
    dims = [0 if d is None else d for d in value.dims or []]
    if node.op_type == "Size":
        return np.array(math.prod(dims), np.int64)
    span = {attribute.name: attribute.i for attribute in node.attribute}
    return np.array(dims[slice(span.get("start"), span.get("end"))], np.int64)


def _computed(
    node: onnx.NodeProto, output: str, inputs: Mapping[str, np.ndarray | None], versions: dict[str, int]
) -> np.ndarray | None:
    """Evaluate a node with small results; None if its inputs do not fit it."""
    try:
        with np.errstate(all="ignore"):
            result = value_of(node, output, inputs, versions)
    except Exception:  # noqa: BLE001 - the node is untrusted, and the evaluator passes on numpy's exceptions
        return None
    return result if result.size <= RANK * SMALL else None
