"""Attention and its gradient by cuDNN, which does not write the scores to memory.

`graph.attention.find` defines the operator. cuDNN's Python package builds a plan for each combination of shapes and
types, once per process. Only algorithms with deterministic gradients are used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.attention_shape import HALF, MASKS, Layout, Shape, packed_shape_of, shape_of
from ortflow.workflow.cuda.call import Call, Tensor
from ortflow.workflow.cuda.cudnn import available, cudnn, handle_on
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.attention.find import MASKED

BLACKWELL = 10
"""Major compute capability for which cuDNN has no deterministic gradient with dropout."""
_CAPABILITY_CODES = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR."""
_ALIGNED = 256
_BLOCK = 256
_OTHER_ENGINES = ["sdpa_"]
"""Prefix of the engines of cuDNN's Python package that are not cuDNN's own, which are excluded."""
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
"""Converts a mask of `rows` by `columns`, either of which may be 1, to the bias that cuDNN adds to the scores.

The bias is [batch or 1, heads or 1, tokens, keys] of the queries' type.
"""


def check_available(*, drops: bool = False) -> None:
    """Raises UserError if the process's GPU cannot compute attention by cuDNN; `drops`: with dropout."""
    driver, device, parts = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    driver.cuCtxGetDevice(ctypes.byref(device))
    for part, code in zip(parts, _CAPABILITY_CODES, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(part), code, device)
    reason = available((parts[0].value, parts[1].value))
    if reason is not None:
        raise UserError(reason, where="train.precision", fix="use fp32 here, or `pip install 'ortflow[cuda]'`")
    if drops and parts[0].value == BLACKWELL:
        raise UserError(
            "attention with dropout in half precision has no gradient in a fixed order on this GPU",
            where="train.precision",
            fix="use fp32 or tf32 here, or export the model without dropout of attention's weights",
        )


class Plan:
    """A compiled graph of cuDNN. `names` are those of its values, in the order of `run`."""

    def __init__(self, shape: Shape, write: Callable[[Any, Shape], Sequence[Any]], handle: Any) -> None:
        package = cudnn()
        kind, single = getattr(package.data_type, HALF[shape.type][0]), package.data_type.FLOAT
        types = {"io_data_type": kind, "intermediate_data_type": single, "compute_data_type": single}
        self._graph = package.pygraph(**types, handle=handle)
        self._values = write(self._graph, shape)
        try:
            self._graph.validate()
            self._graph.build_operation_graph()
            self._graph.create_execution_plans([package.heur_mode.A, package.heur_mode.FALLBACK])
            self._graph.deselect_engines(_OTHER_ENGINES)
            self._graph.check_support()
            self._graph.build_plans()
        except Exception as error:  # noqa: BLE001 - the types are only defined in the package
            raise OrtflowError(
                f"cuDNN does not support attention of {shape}: {' '.join(str(error).split())[:300]}"
            ) from None
        self.workspace = int(self._graph.get_workspace_size())

    def run(self, pointers: Sequence[int], workspace: int, handle: Any) -> None:
        """Queue it; the pointers are in the order that `write` returned."""
        self._graph.execute(dict(zip(self._values, pointers, strict=True)), workspace, handle)


def _operands(graph: Any, shape: Shape) -> list[Any]:
    """q, k and v."""
    return [_value(graph, name, shape, layout) for name, layout in zip("qkv", shape.layouts(), strict=True)]


def _value(graph: Any, name: str, shape: Shape, layout: Layout) -> Any:
    dims, strides = layout
    return graph.tensor(name=name, dim=dims, stride=strides, data_type=_type(shape))


def _type(shape: Shape) -> Any:
    return getattr(cudnn().data_type, HALF[shape.type][0])


def _options(graph: Any, shape: Shape) -> dict[str, Any]:
    """The options that forward and backward pass have in common."""
    options: dict[str, Any] = {"attn_scale": shape.scale, "use_causal_mask": shape.causal}
    if shape.bias:
        plane = shape.tokens * shape.keys
        strides = [shape.mask[1] * plane, plane, shape.keys, 1]
        dims = [*shape.mask, shape.tokens, shape.keys]
        options["bias"] = graph.tensor(name="bias", dim=dims, stride=strides, data_type=_type(shape))
    if shape.dropout:
        unit, kind = [1, 1, 1, 1], cudnn().data_type.INT64
        drawn = [graph.tensor(name=name, dim=unit, stride=unit, data_type=kind) for name in ("seed", "offset")]
        options["dropout"] = (shape.dropout, *drawn)
    return options


def _behind(options: Mapping[str, Any]) -> list[Any]:
    """The values that both passes read after the others: the mask, and the seed and offset of a dropout."""
    return [*([options["bias"]] if "bias" in options else []), *options.get("dropout", ())[1:]]


def _made(value: Any, shape: Shape, layout: Layout) -> Any:
    dims, strides = layout
    value.set_output(True).set_dim(dims).set_stride(strides).set_data_type(_type(shape))
    return value


def _statistics(shape: Shape) -> tuple[list[int], list[int]]:
    return list(shape.statistics), [shape.heads * shape.tokens, shape.tokens, 1, 1]


def forward(graph: Any, shape: Shape) -> list[Any]:
    """Build q, k, v, o, stats, the mask if there is one, and what a dropout draws from."""
    q, k, v = _operands(graph, shape)
    options = _options(graph, shape)
    o, stats = graph.sdpa(name="attention", q=q, k=k, v=v, generate_stats=True, **options)
    _made(o, shape, shape.layout())
    dims, strides = _statistics(shape)
    stats.set_output(True).set_dim(dims).set_stride(strides).set_data_type(cudnn().data_type.FLOAT)
    return [q, k, v, o, stats, *_behind(options)]


def backward(graph: Any, shape: Shape) -> list[Any]:
    """Build do, q, k, v, o, stats, dq, dk, dv, the mask if there is one, and what a dropout draws from."""
    do, o = (_value(graph, name, shape, shape.layout()) for name in ("do", "o"))
    q, k, v = _operands(graph, shape)
    dims, strides = _statistics(shape)
    stats = graph.tensor(name="stats", dim=dims, stride=strides, data_type=cudnn().data_type.FLOAT)
    options = _options(graph, shape)
    # 203 us a call where the order of additions is fixed, and 170 where it is not (cuDNN 9.19, H100, 8 x 12 heads x
    # 1,024 tokens x 64): a killed run has to continue to the bit (docs/benchmarks.md).
    gradients = graph.sdpa_backward(
        name="attention_grad", q=q, k=k, v=v, o=o, dO=do, stats=stats, use_deterministic_algorithm=True, **options
    )
    results = [_made(value, shape, layout) for value, layout in zip(gradients, shape.layouts(), strict=True)]
    return [do, q, k, v, o, stats, *results, *_behind(options)]


@dataclass(frozen=True)
class Given:
    """What a node of either pass reads, apart from the gradient."""

    operands: Sequence[Tensor]
    """q, k and v, or the packed value."""
    others: Sequence[Tensor]
    """What follows them."""
    mask: Tensor | None
    drawn: Sequence[Tensor]
    """Seed and offset, if there is a dropout."""
    shape: Shape


class _Plans:
    """Those of this process."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, Shape], Plan] = {}

    def run(
        self, call: Call, write: Callable[[Any, Shape], Sequence[Any]], pointers: Sequence[int], given: Given
    ) -> None:
        """Queue a pass on the call's stream; the pointers are those of what `write` returns before the mask."""
        shape, mask = given.shape, given.mask
        handle = handle_on(call.stream)
        key = write.__name__, shape
        if key not in self._plans:
            self._plans[key] = Plan(shape, write, handle)
        plan = self._plans[key]
        added = -(-shape.bias * 2 // _ALIGNED) * _ALIGNED
        memory = call.scratch(max(added + plan.workspace, 1))
        if mask is not None:
            _write_bias(call, shape, mask, memory)
        behind = [*([memory] if mask is not None else []), *(operand.pointer for operand in given.drawn)]
        plan.run([*pointers, *behind], memory + added, handle)


def _write_bias(call: Call, shape: Shape, mask: Tensor, pointer: int) -> None:
    sizes = [ctypes.c_int(size) for size in (shape.tokens, shape.keys, *mask.shape[2:])]
    pointers = ctypes.c_void_p(mask.pointer), ctypes.c_void_p(pointer)
    grid = min(-(-shape.bias // _BLOCK), 1 << 16)
    call.launch(source(mask.type, shape.type), "bias", grid, _BLOCK, *pointers, ctypes.c_longlong(shape.bias), *sizes)


def source(mask: int, bias: int) -> str:
    """CUDA C++ of the kernel for a mask of one type and scores of another."""
    condition = "true" if mask == TensorProto.BOOL else "false"
    text = _SOURCE.replace("MASK", MASKS[mask]).replace("BIAS", HALF[bias][1]).replace("CONDITION", condition)
    return text.replace("LOW", f"({MASKED!r}f)")


@cache
def plans() -> _Plans:
    """The plans of this process."""
    return _Plans()


class _Node:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        self._dropout = float(attributes.get("dropout", 0.0))
        check_available(drops=self._dropout > 0)
        self._scale, self._causal = float(attributes.get("scale", 1.0)), bool(attributes.get("causal", 0))
        q, k, v = (bool(flag) for flag in attributes.get("heads_first", (0, 0, 0)))
        self._heads_first = q, k, v
        self._packed: Sequence[int] = attributes.get("packed", ())

    def read(self, call: Call, place: int, more: int = 0) -> Given:
        """The operands from position `place` on, with `more` inputs after them, and what follows these."""
        behind = place + (1 if self._packed else 3)
        operands = [call.given(position) for position in range(place, behind)]
        extras = [call.given(position) for position in range(behind, behind + more)]
        last = behind + more
        mask = call.inputs[last] if len(call.inputs) > last else None
        drawn = [call.given(last + 1), call.given(last + 2)] if self._dropout else []
        if self._packed:
            shape = packed_shape_of(operands[0], self._packed, mask, self._scale, self._causal)
        else:
            q, k, v = operands
            shape = shape_of(q, k, v, mask, self._scale, self._causal, self._heads_first)
        return Given(operands, extras, mask, drawn, replace(shape, dropout=self._dropout))


@operator(half_inputs=(0, 1, 2), half_outputs=(0,), half_only=True)
class Attention(_Node):
    """o and stats from q, k, v, a mask and what a dropout draws from; a packed value may stand for the first three."""

    def run(self, call: Call) -> None:
        """See Operator."""
        given = self.read(call, 0)
        shape = given.shape
        outputs = call.output(0, shape.rows), call.output(1, shape.statistics)
        pointers = [*shape.parts([operand.pointer for operand in given.operands]), *outputs]
        plans().run(call, forward, pointers, given)


@operator(half_inputs=(0, 1, 2, 3, 4), half_outputs=(0, 1, 2), half_only=True)
class AttentionGrad(_Node):
    """dq, dk and dv from do, q, k, v, o, stats and what else Attention reads; or the packed value's gradient."""

    def run(self, call: Call) -> None:
        """See Operator."""
        given, do = self.read(call, 1, 2), call.given(0)
        shape, (o, stats) = given.shape, given.others
        if (do.shape, o.shape, stats.shape, stats.type) != (
            shape.rows, shape.rows, shape.statistics, TensorProto.FLOAT
        ):  # fmt: skip
            raise OrtflowError(f"a gradient of attention of shape {do.shape} for a result of shape {shape.rows}")
        outputs = [call.output(place, operand.shape) for place, operand in enumerate(given.operands)]
        read = [do.pointer, *shape.parts([operand.pointer for operand in given.operands]), o.pointer, stats.pointer]
        plans().run(call, backward, [*read, *shape.parts(outputs)], given)
