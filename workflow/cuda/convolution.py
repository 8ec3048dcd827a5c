"""Convolutions of images with two axes, and both of their gradients, by cuDNN.

Convolution (x, w) -> y; ConvolutionDataGrad (dy, w) -> dx, whose height and width are the attribute `sizes`;
ConvolutionWeightGrad (dy, x) -> dw, fp32. The attributes are those of ONNX's Conv, and `channels_last`: images are then
[samples, height, width, channels] and weights [outputs, height, width, channels]. dw has ONNX's order of axes in either
case. The attribute `weight` is [channels, height, width] of dw if it has fewer channels than x, or if the pixels of x
are in blocks: `block` is then as for ChannelsLast. All other values of a node have one element type.
cuDNN's Python package builds a plan for each shape, once per process; only algorithms with the same result in every run
are used, the fastest of those that it proposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Any

from onnx import TensorProto

from ortflow.workflow.cuda.algorithms import choices, fastest
from ortflow.workflow.cuda.call import Call
from ortflow.workflow.cuda.cudnn import available, cudnn, handle_on
from ortflow.workflow.cuda.registry import operator
from ortflow.workflow.cuda.source import BYTES, blocks, source
from ortflow.workflow.cuda.windows import AXES, TYPES, Shape, Windows, shape_of
from ortflow.workflow.device.cudart import runtime
from ortflow.workflow.device.timing import seconds_of
from ortflow.workflow.errors import OrtflowError, UserError

LARGEST_WORKSPACE = 1 << 28
"""In bytes. Algorithms that need more are not used."""
TRIED = 10
"""Algorithms that are measured, at most."""
ROUNDS = 10
"""Runs of each that are timed."""
_UNWANTED = (
    "NONDETERMINISTIC", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)  # fmt: skip
"""Notes of algorithms that give other bits in each run, or lose digits of halves."""
_FLOAT = int(TensorProto.FLOAT)
_ALIGNED = 256
_BLOCK = 256
Write = Callable[[Any, Shape], Sequence[Any]]
Pointers = Callable[[int], Sequence[int]]


class Plan:
    """A graph of cuDNN. `run` takes pointers in the order in which `write` returns values.

    cuDNN proposes algorithms, best first. `settle` takes the fastest of the first ones, by measurement, and keeps it as
    `lt` does.
    """

    def __init__(self, shape: Shape, write: Write, handle: Any, *, rounds: bool) -> None:
        """`rounds`: whether fp32 factors may be rounded to TF32. Raises what cuDNN's package does."""
        package = cudnn()
        single, notes = package.data_type.FLOAT, package.numerical_note
        types = {"io_data_type": _kind(shape.type), "intermediate_data_type": single, "compute_data_type": single}
        self._graph = package.pygraph(**types, handle=handle)
        self._values = write(self._graph, shape)
        self._graph.validate()
        self._graph.build_operation_graph()
        self._graph.create_execution_plans([package.heur_mode.A, package.heur_mode.FALLBACK])
        unwanted = [getattr(notes, name) for name in _UNWANTED]
        if shape.type == _FLOAT:
            unwanted += [notes.DOWN_CONVERT_INPUTS, *([] if rounds else [notes.TENSOR_CORE])]
        self._graph.deselect_numeric_notes(unwanted)
        self._graph.deselect_workspace_greater_than(LARGEST_WORKSPACE)
        self._graph.check_support()
        self._graph.build_plans()
        self.key = f"cuDNN {package.backend_version()}, {write.__name__}, {shape}, {rounds}"
        self.settled = False

    @property
    def workspace(self) -> int:
        """Bytes that `run` needs."""
        return int(self._graph.get_workspace_size())

    def run(self, pointers: Sequence[int], workspace: int, handle: Any) -> None:
        """Queue it."""
        self._graph.execute(dict(zip(self._values, pointers, strict=True)), workspace, handle)

    def settle(self, call: Call, pointers: Pointers, spare: int, handle: Any) -> None:
        """Choose the algorithm, and wait for the GPU to measure if it was not chosen before. See `_run`."""
        key, names = f"{call.gpu}, {self.key}", self._names()
        known_name = choices().find(key)
        self.settled = True
        if known_name is not None and any(
            name.encode() == known_name and self._selects(place) for place, name in names
        ):
            return
        tried: list[tuple[int, str]] = []
        seconds: list[float | None] = []
        for place, name in names:
            if len(tried) < TRIED and self._selects(place):
                tried.append((place, name))
                seconds.append(self._seconds(call, pointers, spare, handle))
        try:
            place, name = tried[fastest(seconds)]
        except ValueError as error:
            raise OrtflowError(f"cuDNN: {error} of {self.key}") from error
        settled = choices().settle(key, name.encode())
        if not any(candidate.encode() == settled and self._selects(other) for other, candidate in names):
            self._selects(place)

    def _names(self) -> list[tuple[int, str]]:
        count = int(self._graph.get_execution_plan_count())
        return [(place, str(self._graph.get_plan_name_at_index(place))) for place in range(count)]

    def _selects(self, place: int) -> bool:
        """Take the algorithm at a place of the list, unless it does not do or is not wanted."""
        try:
            self._graph.build_plan_at_index(place)
        except Exception:  # noqa: BLE001 - the types are only defined in the package
            return False
        return self.workspace <= LARGEST_WORKSPACE

    def _seconds(self, call: Call, pointers: Pointers, spare: int, handle: Any) -> float | None:
        memory = call.scratch(max(spare + self.workspace, 1))
        arguments = pointers(memory)
        try:
            self.run(arguments, memory + spare, handle)
            # From the host it takes longer to start a kernel of 20 us than to run it, and chance would choose.
            return seconds_of(runtime(), call.stream, lambda: self.run(arguments, memory + spare, handle), ROUNDS)
        except Exception:  # noqa: BLE001 - the types are only defined in the package
            return None


def _kind(element: int) -> Any:
    return getattr(cudnn().data_type, TYPES[element])


def _given(graph: Any, name: str, shape: Shape, sizes: Sequence[int]) -> Any:
    dims, strides = shape.layout(sizes)
    return graph.tensor(name=name, dim=dims, stride=strides, data_type=_kind(shape.type))


def _made(value: Any, shape: Shape, sizes: Sequence[int]) -> Any:
    dims, strides = shape.layout(sizes)
    return value.set_output(True).set_dim(dims).set_stride(strides).set_data_type(_kind(shape.type))


def _places(shape: Shape) -> dict[str, list[int]]:
    windows = shape.windows
    before, behind = windows.pads[:AXES], windows.pads[AXES:]
    return {
        "pre_padding": list(before), "post_padding": list(behind), "stride": list(windows.strides),
        "dilation": list(windows.dilations),
    }  # fmt: skip


def forward(graph: Any, shape: Shape) -> list[Any]:
    """Build x, w, y."""
    x, w = _given(graph, "x", shape, shape.image), _given(graph, "w", shape, shape.weight)
    y = graph.conv_fprop(image=x, weight=w, name="convolution", **_places(shape))
    _made(y, shape, shape.made)
    return [x, w, y]


def data_gradient(graph: Any, shape: Shape) -> list[Any]:
    """Build dy, w, dx."""
    dy, w = _given(graph, "dy", shape, shape.made), _given(graph, "w", shape, shape.weight)
    dx = graph.conv_dgrad(loss=dy, filter=w, name="data_gradient", **_places(shape))
    _made(dx, shape, shape.image)
    return [dy, w, dx]


def weight_gradient(graph: Any, shape: Shape) -> list[Any]:
    """Build dy, x, dw."""
    dy, x = _given(graph, "dy", shape, shape.made), _given(graph, "x", shape, shape.image)
    dw = graph.conv_wgrad(image=x, loss=dy, name="weight_gradient", **_places(shape))
    _made(dw, shape, shape.weight)
    return [dy, x, dw]


class Plans:
    """The plans of this process."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, Shape, bool], Plan] = {}

    def find(self, shape: Shape, write: Write, handle: Any, *, rounds: bool) -> Plan:
        """The plan. Raises OrtflowError if cuDNN has no algorithm."""
        key = write.__name__, shape, rounds
        if key not in self._plans:
            try:
                self._plans[key] = Plan(shape, write, handle, rounds=rounds)
            except Exception as error:  # noqa: BLE001 - the types are only defined in the package
                reason = " ".join(str(error).split())[:300]
                raise OrtflowError(
                    f"cuDNN does not support the {write.__name__.replace('_', ' ')} of {shape}: {reason}"
                ) from None
        return self._plans[key]


@cache
def plans() -> Plans:
    """The only ones."""
    return Plans()


def _run(call: Call, shape: Shape, write: Write, pointers: Pointers, spare: int = 0) -> int:
    """Queue a pass.

    Parameters
    ----------
    pointers
        From the scratch memory to the values that `write` returns.
    spare
        Bytes at the beginning of the scratch memory that the pass may write a value to.

    Returns
    -------
    int
        The scratch memory.

    Raises
    ------
    OrtflowError
        If cuDNN has no algorithm.
    """
    handle = handle_on(call.stream)
    plan = plans().find(shape, write, handle, rounds=call.rounds)
    if not plan.settled and not call.captured:
        plan.settle(call, pointers, spare, handle)
    memory = call.scratch(max(spare + plan.workspace, 1))
    plan.run(pointers(memory), memory + spare, handle)
    return memory


class _Node:
    def __init__(self, attributes: Mapping[str, Any]) -> None:
        reason = available(what="convolution")
        if reason is not None:
            raise UserError(reason, where="train.precision", fix="use fp32 here, or `pip install 'ortflow[cuda]'`")
        self._windows, self._sizes = Windows.of(attributes), attributes.get("sizes", ())
        self._weight = tuple(attributes.get("weight", ()))
        self._block = tuple(attributes.get("block", ()))


@operator(half_inputs=(0, 1), half_outputs=(0,), half_only=True)
class Convolution(_Node):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """See Operator."""
        x, w = call.given(0), call.given(1)
        shape = shape_of(self._windows, image=x, weight=w)
        y = call.output(0, shape.stored(shape.made))
        _run(call, shape, forward, lambda _: (x.pointer, w.pointer, y))


@operator(half_inputs=(0, 1), half_outputs=(0,), half_only=True)
class ConvolutionDataGrad(_Node):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """See Operator."""
        dy, w = call.given(0), call.given(1)
        shape = shape_of(self._windows, weight=w, made=dy, sizes=self._sizes)
        dx = call.output(0, shape.stored(shape.image))
        _run(call, shape, data_gradient, lambda _: (dy.pointer, w.pointer, dx))


@operator(half_inputs=(0, 1), half_only=True)
class ConvolutionWeightGrad(_Node):
    """See the module's docstring."""

    def run(self, call: Call) -> None:
        """See Operator."""
        dy, x = call.given(0), call.given(1)
        shape = shape_of(self._windows, image=x, made=dy)
        outputs, stored, *kernel = shape.weight
        channels, *sizes = self._weight or (stored, *kernel)
        dw = call.output(0, (outputs, channels, *sizes))
        places = math.prod(kernel) if self._windows.channels_last else 1
        if shape.type == _FLOAT and channels == stored and places == 1:
            _run(call, shape, weight_gradient, lambda _: (dy.pointer, x.pointer, dw))
            return
        spare = -(-BYTES[shape.type] * math.prod(shape.weight) // _ALIGNED) * _ALIGNED
        # cuDNN writes halves, which are converted: where it writes fp32 itself, ResNet-50 takes twice as long.
        target = _run(call, shape, weight_gradient, lambda memory: (dy.pointer, x.pointer, memory), spare)
        if self._block:
            function, count = "out_of_blocks", outputs * channels * math.prod(sizes)
            numbers = [*kernel, stored, channels, *sizes, *self._block]
        else:
            function, count, numbers = "channels_first", outputs * channels, [places, stored, channels]
        call.launch(
            source("convolution", (("X", shape.type),)), function, blocks(count, _BLOCK), _BLOCK,
            c_void_p(target), c_void_p(dw), c_int64(count), *map(c_int, numbers),
        )  # fmt: skip
