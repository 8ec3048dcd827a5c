"""Connects nodes of `ortflow.cuda` to their implementations.

In a model file a node has its plain name, and its outputs are described with their element types. When a session is
opened, `Operators.bind` renames every node to its signature, from which ONNX Runtime infers types, and adds a number
that
identifies the implementation at run time. Elementwise groups are launched from C; all others call `Operator.run`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.cuda import FUSED, FUSED_SUMS, KERNELS, SUMMING, table
from ortflow.workflow.cuda.call import Call, Operator, PlacedCall, Shards, Tensor
from ortflow.workflow.cuda.library import operator_library
from ortflow.workflow.cuda.nvrtc import EXACT, ROUNDED, Compiler
from ortflow.workflow.device.cudart import WITHIN, CudaError
from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.edit import attributes_of
from ortflow.workflow.graph.memory.element_types import element_types

if TYPE_CHECKING:
    from ortflow.workflow.device.cuda import CudaDevice

__all__ = ["Call", "Operators", "PlacedCall", "Tensor"]
AXES = 8
_LETTERS = {TensorProto.FLOAT: "f", TensorProto.FLOAT16: "h", TensorProto.BFLOAT16: "b", TensorProto.DOUBLE: "d",
            TensorProto.INT64: "l", TensorProto.INT32: "i", TensorProto.BOOL: "o"}  # fmt: skip
_COUNTERS = 1024
"""At least so many are allocated."""
_alive: list[Operators] = []
"""Sessions call these as long as they live."""


class _CTensor(ctypes.Structure):
    """The struct of operators.c."""

    _fields_ = (("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("dims", ctypes.c_int64 * AXES))


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.POINTER(_CTensor))


class Operators:
    """The `Owner` of all calls on the process's GPU. If `path` is None there are no operators, and `note` says why."""

    def __init__(self, device: CudaDevice) -> None:
        path, self.note = operator_library()
        self.path = None
        self.on_bucket: Callable[[int, Sequence[int]], None] | None = None
        self.on_rows: Callable[[int, Tensor, Tensor], None] | None = None
        self.on_collective: Callable[[int, int, int, Tensor, int], None] | None = None
        self.shards: dict[int, Shards] = {}
        try:
            self.compiler = Compiler(device.gpu.capability)
        except OSError as error:
            self.note = str(error)
            return
        if path is None:
            return
        self.path = path
        self._device = device
        self._library: Any = ctypes.CDLL(str(path))
        self._library.ortflow_cuda_message.restype = ctypes.c_void_p
        self._library.ortflow_cuda_function.restype = ctypes.c_int64
        self._library.ortflow_cuda_function.argtypes = [
            *[ctypes.c_void_p] * len(KERNELS + SUMMING),
            ctypes.c_int64,
        ]
        self._message = self._library.ortflow_cuda_message()
        self._callback = _CALLBACK(self._run)
        self._nodes: list[tuple[Operator, list[int], list[int]]] = []
        self._fused: dict[str, int] = {}
        self._scratch: list[tuple[int, int]] = []
        self._counters: list[tuple[int, int]] = []
        self.stream = device.stream
        _alive.append(self)

    @property
    def gpu(self) -> str:
        """See Call."""
        return self._device.gpu.name

    @property
    def captured(self) -> bool:
        """See Call."""
        return self._device.capturing

    @property
    def rounds(self) -> bool:
        """See Call."""
        return self._device.precision == "tf32"

    def bind(self, content: bytes) -> bytes:
        """Prepare a model for a session of this process, which must be the next session to be opened.

        Raises OrtflowError if a kernel cannot be compiled, or a value's element type is unknown.
        """
        model = onnx.ModelProto.FromString(content)
        types = element_types(model)
        for node in model.graph.node:
            if node.domain == CUDA_DOMAIN:
                self._bind(node, types)
        launch = ctypes.cast(self.compiler.driver.cuLaunchKernel, ctypes.c_void_p)
        callback = ctypes.cast(self._callback, ctypes.c_void_p)
        self._library.ortflow_cuda_setup(launch, callback, ctypes.c_void_p(self.stream))
        return bytes(model.SerializeToString())

    def _bind(self, node: onnx.NodeProto, types: Mapping[str, int]) -> None:
        inputs = [types.get(name, TensorProto.UNDEFINED) if name else -TensorProto.FLOAT for name in node.input]
        outputs = [types.get(name, TensorProto.UNDEFINED) for name in node.output]
        if TensorProto.UNDEFINED in (*inputs, *outputs):
            values = [
                name for name, kind in zip((*node.input, *node.output), (*inputs, *outputs), strict=True) if not kind
            ]
            raise OrtflowError(f"node {node.name!r} ({node.op_type}): the element type of {values} is not known")
        attributes = attributes_of(node)
        if node.op_type in (FUSED, FUSED_SUMS):
            sums = node.op_type == FUSED_SUMS
            halves = {TensorProto.FLOAT16, TensorProto.BFLOAT16}.issuperset(outputs[:-1] if sums else outputs)
            options = ROUNDED if halves else EXACT
            handle = self._fused_function(_text(attributes["source"]), int(attributes["lanes"]), options, sums=sums)
            attributes_kept = [
                attribute for attribute in node.attribute if attribute.name.startswith(("inputs_of_", "summed"))
            ]
        else:
            operator = table.OPERATORS[node.op_type](
                {key: _text(value) if isinstance(value, bytes) else value for key, value in attributes.items()}
            )
            self._nodes.append((operator, inputs, outputs))
            handle, attributes_kept = len(self._nodes) - 1, []
        attributes_kept = [
            onnx.AttributeProto.FromString(attribute.SerializeToString()) for attribute in attributes_kept
        ]
        del node.attribute[:]
        node.attribute.extend([*attributes_kept, helper.make_attribute("handle", handle)])
        node.op_type = f"{node.op_type}_{_signature(inputs)}_{_signature(outputs)}"
        numbers = (ctypes.c_int * (len(inputs) + len(outputs)))(*inputs, *outputs)
        name, counts = node.op_type.encode(), (ctypes.c_size_t(len(inputs)), ctypes.c_size_t(len(outputs)))
        if not self._library.ortflow_cuda_declare(name, *counts, numbers):
            raise OrtflowError(f"node {node.name!r} ({node.op_type}) has more values than an operator takes")

    def _fused_function(self, source: str, lanes: int, options: Sequence[str], *, sums: bool) -> int:
        # The same text has the same stored types, and so the same options.
        if source not in self._fused:
            names = SUMMING if sums else KERNELS
            functions = [self.compiler.function(source, name, options) for name in names]
            handles = [None] * len(KERNELS) + functions if sums else functions + [None] * len(SUMMING)
            self._fused[source] = int(self._library.ortflow_cuda_function(*handles, lanes))
        return self._fused[source]

    def _run(self, handle: int, call: int, inputs: Any) -> int:
        """Run a node. If it fails, the message is stored where the C code reads it."""
        try:
            operator, input_types, output_types = self._nodes[handle]
            tensors = [
                None if kind < 0 else Tensor(inputs[i].data or 0, tuple(inputs[i].dims[: inputs[i].rank]), kind)
                for i, kind in enumerate(input_types)
            ]
            operator.run(Call(self, call, tensors, output_types))
            return 0
        except Exception as error:  # noqa: BLE001 - an exception cannot pass through C
            words = f"{type(operator).__name__}: {error}".encode()[:1000] + b"\0"
            ctypes.memmove(self._message, words, len(words))
            return 1

    def output(self, call: int, place: int, shape: Sequence[int]) -> int:
        """See Call."""
        pointer, dims = ctypes.c_void_p(), (ctypes.c_int64 * max(len(shape), 1))(*shape)
        arguments = ctypes.c_size_t(place), dims, ctypes.c_size_t(len(shape)), ctypes.byref(pointer)
        if self._library.ortflow_cuda_output(ctypes.c_void_p(call), *arguments):
            raise OrtflowError(f"ONNX Runtime cannot allocate output {place} of shape {list(shape)}")
        return int(pointer.value or 0)

    def scratch(self, size: int) -> int:
        """See Call. Earlier memory is kept, since a captured graph may use it."""
        if not self._scratch or self._scratch[-1][1] < size:
            size = max(size, 2 * self._scratch[-1][1] if self._scratch else 1 << 20)
            self._scratch.append((self._reserved(size), size))
        return self._scratch[-1][0]

    def counters(self, count: int) -> int:
        """See Call. Earlier ones are kept, as with `scratch`."""
        if not self._counters or self._counters[-1][1] < count:
            if self.captured:
                raise OrtflowError("a captured graph would set counters to 0 again in each of its runs")
            count = max(count, _COUNTERS)
            self._counters.append((self._reserved(4 * count), count))
            self._device.zero(self._counters[-1][0], 4 * count)
        return self._counters[-1][0]

    def _reserved(self, size: int) -> int:
        try:
            return self._device.reserve(size)
        except CudaError as error:
            raise self._device.failure(error.message) from error

    def copy(self, target: int, source: int, size: int) -> None:
        """See Call."""
        self._device.here().copy(target, source, size, WITHIN, self.stream)

    def launch(
        self,
        source: str,
        function: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        arguments: Sequence[Any],
        shared: int = 0,
        options: Sequence[str] = (),
        stream: int | None = None,
    ) -> None:
        """See Call; on another stream than the sessions' if one is given."""
        compiled = self.compiler.function(source, function, options)
        grids, blocks = (([*size, 1, 1] if not isinstance(size, int) else [size, 1, 1])[:3] for size in (grid, block))
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        code = self.compiler.driver.cuLaunchKernel(
            compiled, *grids, *blocks, shared, ctypes.c_void_p(self.stream if stream is None else stream), values, None
        )
        if code:
            raise OrtflowError(f"CUDA cannot launch {function} (error {code})")


def _signature(types: Sequence[int]) -> str:
    return "".join("x" if kind < 0 else _LETTERS.get(kind, f"t{kind}") for kind in types)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
