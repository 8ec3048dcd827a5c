"""Attention and its gradient by cuDNN, which never writes the scores to memory.

What is computed stands in `graph.attention`. cuDNN's own Python package builds a plan for each combination of shapes
and types, once in a process. Always the algorithm whose gradient is the same in every run.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.operators import Call, Tensor
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.attention import MASKED

OLDEST = 90500
"""Version of cuDNN from which on all of it is there, the deterministic gradient too."""
CAPABILITY = (8, 0)
_CAPABILITY_CODES = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
_ALIGNED = 256
_BLOCK = 256
_OTHER_ENGINES = ["sdpa_"]
"""What its Python package would compile by other means than cuDNN, if it could."""
_HALF = {TensorProto.FLOAT16: ("HALF", "__half"), TensorProto.BFLOAT16: ("BFLOAT16", "__nv_bfloat16")}
_MASKS = {TensorProto.BOOL: "bool", TensorProto.FLOAT: "float", **{kind: name for kind, (_, name) in _HALF.items()}}
_SOURCE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef MASK M;
typedef BIAS T;
extern "C" __global__ void bias(const M *mask, T *out, long long count, int tokens, int keys, int rows, int columns) {
  long long threads = gridDim.x * (long long)blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += threads) {
    long long key = i % keys, row = i / keys, token = row % tokens, plane = row / tokens;
    float x = (float)mask[(plane * rows + (rows > 1 ? token : 0)) * columns + (columns > 1 ? key : 0)];
    out[i] = T(CONDITION ? (x != 0.f ? 0.f : LOW) : (x < LOW ? LOW : x));
  }
}
"""
"""A mask of `rows` by `columns`, either of which may be 1, as what cuDNN adds to the scores.

That is [batch or 1, heads or 1, tokens, keys] of the queries' type.
"""


def available(capability: tuple[int, int] | None = None) -> str | None:
    """Why attention cannot be computed here, in a sentence; None where it can."""
    try:
        version = int(_cudnn().backend_version())
    except ImportError:
        return "attention in half precision needs the package nvidia-cudnn-frontend, which is not installed"
    except (OSError, RuntimeError, AttributeError) as error:
        return f"attention in half precision needs cuDNN, which cannot be loaded ({' '.join(str(error).split())[:200]})"
    if version < OLDEST:
        return f"attention in half precision needs cuDNN 9.5 at least, and its version is {version}"
    if capability is not None and capability < CAPABILITY:
        return "attention in half precision needs a GPU of compute capability 8.0 at least, and this has {}.{}".format(
            *capability
        )
    return None


def check_available() -> None:
    """Raises UserError where the process's GPU cannot compute attention by cuDNN."""
    driver, device, parts = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    driver.cuCtxGetDevice(ctypes.byref(device))
    for part, code in zip(parts, _CAPABILITY_CODES, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(part), code, device)
    reason = available((parts[0].value, parts[1].value))
    if reason is not None:
        raise UserError(reason, where="train.precision", fix="use fp32 here, or `pip install 'ortflow[cuda]'`")


def _cudnn() -> Any:
    return importlib.import_module("cudnn")


@dataclass(frozen=True)
class Shape:
    """What a plan is made for. The mask's batch and heads are 0 where there is none."""

    type: int
    batch: int
    tokens: int
    keys: int
    heads: int
    shared: int
    """Heads of keys and values."""
    size: int
    mask: tuple[int, int]
    scale: float
    causal: bool
    heads_first: tuple[bool, bool, bool] = (False, False, False)
    """Of queries, keys and values: they are [batch, heads, tokens, size]."""

    @property
    def statistics(self) -> tuple[int, int, int, int]:
        """Sizes of the logarithms of the sums."""
        return self.batch, self.heads, self.tokens, 1

    @property
    def bias(self) -> int:
        """Elements of the mask as cuDNN adds it."""
        return self.mask[0] * self.mask[1] * self.tokens * self.keys


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool,
    heads_first: tuple[bool, bool, bool] = (False, False, False),
) -> Shape:  # fmt: skip
    """Of the operands' shapes. Raises OrtflowError for shapes and types that do not fit each other."""
    by_tokens = []
    for each, first in zip((q, k, v), heads_first, strict=True):
        if len(each.shape) != 4:
            raise OrtflowError(f"attention of a value of shape {each.shape}")
        a, b, c, d = each.shape
        by_tokens.append((a, c, b, d) if first else (a, b, c, d))
    batch, tokens, heads, size = by_tokens[0]
    keys, shared = by_tokens[1][1:3]
    if by_tokens[1:] != [(batch, keys, shared, size)] * 2 or heads % shared:
        raise OrtflowError(f"attention of queries {q.shape}, keys {k.shape} and values {v.shape}")
    if q.type not in _HALF or {k.type, v.type} != {q.type}:
        raise OrtflowError("attention of queries, keys and values that are not all fp16 or all bf16")
    planes = 0, 0
    if mask is not None:
        whole = batch, heads, tokens, keys
        if len(mask.shape) != 4 or any(a not in (1, b) for a, b in zip(mask.shape, whole, strict=True)):
            raise OrtflowError(f"a mask of shape {mask.shape} for scores of shape {whole}")
        if mask.type not in _MASKS:
            raise OrtflowError(f"a mask of ONNX's type {mask.type}")
        planes = mask.shape[0], mask.shape[1]
    return Shape(q.type, batch, tokens, keys, heads, shared, size, planes, scale, causal, heads_first)


class Plan:
    """A graph of cuDNN's that has been compiled. `names` are those of its values, in the order of `run`."""

    def __init__(self, shape: Shape, write: Callable[[Any, Shape], Sequence[Any]], handle: Any) -> None:
        cudnn = _cudnn()
        kind, single = getattr(cudnn.data_type, _HALF[shape.type][0]), cudnn.data_type.FLOAT
        types = {"io_data_type": kind, "intermediate_data_type": single, "compute_data_type": single}
        self._graph = cudnn.pygraph(**types, handle=handle)
        self._values = write(self._graph, shape)
        try:
            self._graph.validate()
            self._graph.build_operation_graph()
            self._graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            self._graph.deselect_engines(_OTHER_ENGINES)
            self._graph.check_support()
            self._graph.build_plans()
        except Exception as error:  # noqa: BLE001 - of types that only the package has
            raise OrtflowError(f"cuDNN takes no attention of {shape}: {' '.join(str(error).split())[:300]}") from None
        self.workspace = int(self._graph.get_workspace_size())

    def run(self, pointers: Sequence[int], workspace: int, handle: Any) -> None:
        """Queue it; the pointers are in the order of what `write` gave."""
        self._graph.execute(dict(zip(self._values, pointers, strict=True)), workspace, handle)


def _operands(graph: Any, shape: Shape) -> list[Any]:
    """q, k and v."""
    return [
        _value(graph, name, shape, *size, first)
        for name, size, first in zip("qkv", _sizes(shape), shape.heads_first, strict=True)
    ]


def _sizes(shape: Shape) -> list[tuple[int, int]]:
    """Tokens and heads of queries, keys and values."""
    keys = shape.keys, shape.shared
    return [(shape.tokens, shape.heads), keys, keys]


def _value(graph: Any, name: str, shape: Shape, tokens: int, heads: int, first: bool = False) -> Any:
    dims, strides = _layout(shape, tokens, heads, first)
    return graph.tensor(name=name, dim=dims, stride=strides, data_type=_type(shape))


def _layout(shape: Shape, tokens: int, heads: int, first: bool) -> tuple[list[int], list[int]]:
    """Sizes and strides in cuDNN's order, which is batch, heads, tokens, size; `first`: they lie in it, too."""
    size = shape.size
    steps = [tokens * size, size] if first else [size, heads * size]
    return [shape.batch, heads, tokens, size], [tokens * heads * size, *steps, 1]


def _type(shape: Shape) -> Any:
    return getattr(_cudnn().data_type, _HALF[shape.type][0])


def _options(graph: Any, shape: Shape) -> dict[str, Any]:
    """What forward and backward pass have in common."""
    options = {"attn_scale": shape.scale, "use_causal_mask": shape.causal}
    if shape.bias:
        plane = shape.tokens * shape.keys
        strides = [shape.mask[1] * plane, plane, shape.keys, 1]
        dims = [*shape.mask, shape.tokens, shape.keys]
        options["bias"] = graph.tensor(name="bias", dim=dims, stride=strides, data_type=_type(shape))
    return options


def _made(value: Any, shape: Shape, tokens: int, heads: int, first: bool = False) -> Any:
    dims, strides = _layout(shape, tokens, heads, first)
    value.set_output(True).set_dim(dims).set_stride(strides).set_data_type(_type(shape))
    return value


def _statistics(shape: Shape) -> tuple[list[int], list[int]]:
    return list(shape.statistics), [shape.heads * shape.tokens, shape.tokens, 1, 1]


def forward(graph: Any, shape: Shape) -> list[Any]:
    """q, k, v, o, stats, and the mask if there is one."""
    q, k, v = _operands(graph, shape)
    options = _options(graph, shape)
    o, stats = graph.sdpa(name="attention", q=q, k=k, v=v, generate_stats=True, **options)
    _made(o, shape, shape.tokens, shape.heads)
    dims, strides = _statistics(shape)
    stats.set_output(True).set_dim(dims).set_stride(strides).set_data_type(_cudnn().data_type.FLOAT)
    return [q, k, v, o, stats, *([options["bias"]] if shape.bias else [])]


def backward(graph: Any, shape: Shape) -> list[Any]:
    """do, q, k, v, o, stats, dq, dk, dv, and the mask if there is one."""
    do, o = (_value(graph, name, shape, shape.tokens, shape.heads) for name in ("do", "o"))
    q, k, v = _operands(graph, shape)
    dims, strides = _statistics(shape)
    stats = graph.tensor(name="stats", dim=dims, stride=strides, data_type=_cudnn().data_type.FLOAT)
    options = _options(graph, shape)
    found = graph.sdpa_backward(
        name="attention_grad", q=q, k=k, v=v, o=o, dO=do, stats=stats, use_deterministic_algorithm=True, **options
    )
    made = [
        _made(value, shape, *size, first)
        for value, size, first in zip(found, _sizes(shape), shape.heads_first, strict=True)
    ]
    return [do, q, k, v, o, stats, *made, *([options["bias"]] if shape.bias else [])]


class _Library:
    """cuDNN's handle of this process, and its plans."""

    def __init__(self) -> None:
        self._handle = _cudnn().create_handle()
        self._stream: int | None = None
        self._plans: dict[tuple[str, Shape], Plan] = {}

    def run(self, call: Call, write: Callable[[Any, Shape], Sequence[Any]], shape: Shape, pointers: Sequence[int],
            mask: Tensor | None) -> None:  # fmt: skip
        """Queue a pass on the call's stream."""
        if self._stream != call.stream:
            _cudnn().set_stream(self._handle, call.stream)
            self._stream = call.stream
        key = write.__name__, shape
        if key not in self._plans:
            self._plans[key] = Plan(shape, write, self._handle)
        plan = self._plans[key]
        added = -(-shape.bias * 2 // _ALIGNED) * _ALIGNED
        memory = call.scratch(max(added + plan.workspace, 1))
        if mask is not None:
            _write_bias(call, shape, mask, memory)
        plan.run([*pointers, *([memory] if mask is not None else [])], memory + added, self._handle)


def _write_bias(call: Call, shape: Shape, mask: Tensor, pointer: int) -> None:
    sizes = [ctypes.c_int(size) for size in (shape.tokens, shape.keys, *mask.shape[2:])]
    pointers = ctypes.c_void_p(mask.pointer), ctypes.c_void_p(pointer)
    grid = min(-(-shape.bias // _BLOCK), 1 << 16)
    call.launch(source(mask.type, shape.type), "bias", grid, _BLOCK, *pointers, ctypes.c_longlong(shape.bias), *sizes)


def source(mask: int, bias: int) -> str:
    """CUDA C++ of the kernel for a mask of one type and scores of another."""
    condition = "true" if mask == TensorProto.BOOL else "false"
    found = _SOURCE.replace("MASK", _MASKS[mask]).replace("BIAS", _HALF[bias][1]).replace("CONDITION", condition)
    return found.replace("LOW", f"({MASKED!r}f)")


@cache
def _library() -> _Library:
    return _Library()


class _Node:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        check_available()
        self._scale, self._causal = float(attributes.get("scale", 1.0)), bool(attributes.get("causal", 0))
        q, k, v = (bool(flag) for flag in attributes.get("heads_first", (0, 0, 0)))
        self._heads_first = q, k, v

    def shape(self, call: Call, place: int) -> tuple[list[Tensor], Shape]:
        """The operands, which stand from `place` on, and the shape with the mask."""
        q, k, v = (call.given(each) for each in range(place, place + 3))
        return [q, k, v], shape_of(q, k, v, mask_of(call, place), self._scale, self._causal, self._heads_first)


def mask_of(call: Call, place: int) -> Tensor | None:
    """The last input, where it is given: behind the operands, or what else a gradient reads."""
    last = 3 if place == 0 else 6
    return call.inputs[last] if len(call.inputs) > last else None


class Attention(_Node):
    """o and stats of q, k, v and a mask."""

    def run(self, call: Call) -> None:
        """See Operator."""
        operands, shape = self.shape(call, 0)
        outputs = call.output(0, (shape.batch, shape.tokens, shape.heads, shape.size)), call.output(1, shape.statistics)
        pointers = [*(each.pointer for each in operands), *outputs]
        _library().run(call, forward, shape, pointers, mask_of(call, 0))


class AttentionGrad(_Node):
    """dq, dk and dv of do, q, k, v, o, stats and a mask."""

    def run(self, call: Call) -> None:
        """See Operator."""
        operands, shape = self.shape(call, 1)
        do, o, stats = (call.given(place) for place in (0, 4, 5))
        rows = shape.batch, shape.tokens, shape.heads, shape.size
        if (do.shape, o.shape, stats.shape, stats.type) != (rows, rows, shape.statistics, TensorProto.FLOAT):
            raise OrtflowError(f"a gradient of attention of shape {do.shape} for a result of shape {rows}")
        outputs = [call.output(place, each.shape) for place, each in enumerate(operands)]
        read = (do, *operands, o, stats)
        _library().run(call, backward, shape, [*(each.pointer for each in read), *outputs], mask_of(call, 1))
