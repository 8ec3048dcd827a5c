"""The binding of an ONNX Runtime session to flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.device.shard import Sliced
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.collectives import take_error
from ortflow.workflow.sessions.failures import SESSION_ERRORS, ran_out, run_failure

_FLOATS = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""ONNX Runtime's name of a type -> its number in onnx.TensorProto."""


class Binding:
    """An I/O binding of a session: graph inputs and outputs bound to slices of flat buffers or to arrays."""

    def __init__(self, session: onnxruntime.InferenceSession, device: Device) -> None:
        self._session, self.device = session, device
        self._binding = session.io_binding()
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = 3
        self._queued = onnxruntime.RunOptions()
        self._queued.log_severity_level = 3
        if device.kind == "cuda":
            self._queued.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._kept: dict[str, Any] = {}
        self.prefetches = False
        """Whether arrays may be given to `prefetch` before `feed`."""
        self._bound: dict[str, None] = {}
        """Outputs in the order in which they were tied, which ONNX Runtime keeps."""
        self._fed: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.inputs = {value.name for value in session.get_inputs()}
        self.read_on_host = read_on_host(session) if device.kind == "cuda" else frozenset[str]()
        """Inputs that a CPU node reads: ONNX Runtime copies them from the GPU when they are bound, and only then."""
        self._tied_on_host: dict[str, tuple[Buffer, tuple[int, ...], Any]] = {}
        self.outputs = {value.name for value in session.get_outputs()}
        self.shapes: dict[str, tuple[int | str | None, ...]] = {v.name: tuple(v.shape) for v in session.get_outputs()}
        """Shapes of the outputs; names or None for lengths that the graph leaves open."""

    def read_from(self, name: str, buffer: Buffer, shape: tuple[int, ...], element: int | None = None) -> None:
        """Bind an input to a buffer if the graph has it: graphs for GPUs contain only the inputs that they read.

        `element` is its type as ONNX counts them, if it is not the buffer's.
        """
        if name not in self.inputs:
            return
        kind = buffer.dtype if element is None else element
        if name in self.read_on_host:
            self._tied_on_host[name] = buffer, shape, kind
        self._tie(name, buffer, shape, kind)

    def _tie(self, name: str, buffer: Buffer, shape: tuple[int, ...], kind: Any) -> None:
        self._kept[name] = buffer  # ONNX Runtime holds only the address
        self._binding.bind_input(name, self.device.kind, self.device.index, kind, list(shape), buffer.pointer)

    def write_to(self, name: str, buffer: Buffer, shape: tuple[int, ...], element: int | None = None) -> None:
        """Bind an output to a buffer; `element` as in `read_from`."""
        self._kept[name] = buffer
        self._bound.setdefault(name)
        self._binding.bind_output(
            name, self.device.kind, self.device.index, buffer.dtype if element is None else element, list(shape),
            buffer.pointer,
        )  # fmt: skip

    def element_of(self, output: str) -> int | None:
        """Element type (of onnx.TensorProto) of an output; None if there is none, or it is not a float."""
        types = {value.name: value.type for value in self._session.get_outputs()}
        return _FLOATS.get(types.get(output, ""))

    def read_tensors(self, index: FlatIndex, buffer: Sliced) -> None:
        """Bind every input that the index names to its slice."""
        for entry in index:
            if entry.name in self.inputs:
                self.read_from(entry.name, buffer.slice(entry.offset, entry.end), entry.tensor.shape)

    def feed(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind an input to an array's values; the array must live until the run has finished."""
        buffer = self.device.lend(array, self._kept.get(name), prefetched=self.prefetches)
        self._fed[name] = (buffer.pointer, array.shape)
        self.read_from(name, buffer, array.shape)

    def prefetch(self, name: str, array: npt.NDArray[Any]) -> None:
        """Start to copy an array that will be fed; see `Device.prefetch`. The first one of an input is not."""
        buffer = self._kept.get(name)
        if buffer is not None:
            self.device.prefetch(array, buffer)

    @property
    def fed(self) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """Name, address and shape of everything that was bound by `feed`."""
        return tuple((name, *place) for name, place in self._fed.items())

    def run(self, *, give_back: bool = False) -> None:
        """Run the graph once; while the device notes a CUDA graph, only queue it.

        Otherwise the run is over when this returns. With `give_back`, return to the system what the shared arena holds
        unused.

        Raises UserError if a node refuses what it is given: the same batch would be refused again.
        """
        if self._tied_on_host:
            self.device.synchronize()
            for name, (buffer, shape, kind) in self._tied_on_host.items():
                self._tie(name, buffer, shape, kind)
        try:
            # ONNX Runtime uses memory of the host again behind a run, from which the GPU may still have to copy.
            options = self._queued if self.device.capturing else self._options
            if give_back:
                self.device.memory_moves()
                options = _shrinking(self.device.arenas)
            self._session.run_with_iobinding(self._binding, options)
        except SESSION_ERRORS as error:
            raised = take_error()
            if raised is not None:
                raise raised from None
            raise self.device.failure(str(error)) if ran_out(str(error)) else run_failure(str(error)) from error

    def run_for(self, outputs: Sequence[str]) -> dict[str, onnxruntime.OrtValue]:
        """Run the graph once; these outputs, none of which may be tied, on the device.

        They are this binding's, and live until `forget` or the next run.
        """
        self.forget(outputs)
        self.run()
        values = self._binding.get_outputs() if outputs else []
        places = {name: place for place, name in enumerate(self._bound)}
        return {name: values[places[name]] for name in outputs}

    def keep(self, values: Mapping[str, onnxruntime.OrtValue]) -> None:
        """Let later runs write what `run_for` has made to the same memory, until `forget`."""
        for name, value in values.items():
            self._kept[name] = value
            self._binding.bind_ortvalue_output(name, value)

    def forget(self, outputs: Iterable[str]) -> None:
        """Give the memory of outputs back that `run_for` has left."""
        for name in outputs:
            self._bound.setdefault(name)
            self._binding.bind_output(name, self.device.kind, self.device.index)

    def release(self, inputs: Iterable[str]) -> None:
        """Let go of the memory of inputs, which must be tied again before the next run."""
        for name in inputs:
            self._kept.pop(name, None)

    def fetch(self, outputs: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Run the graph once; these outputs, none of which may be tied, as arrays on the host."""
        for name in outputs:
            self._binding.bind_output(name)
        self.run()
        fetched: list[npt.NDArray[Any]] = self._binding.copy_outputs_to_cpu()
        return fetched


def read_on_host(session: onnxruntime.InferenceSession) -> frozenset[str]:
    """The inputs that a session on a GPU reads from the host's memory."""
    places = session.get_input_memory_infos()
    return frozenset(
        value.name for value, place in zip(session.get_inputs(), places, strict=True) if place.name == "Cpu"
    )


def _shrinking(arenas: str) -> onnxruntime.RunOptions:
    """Options of a run after which `arenas` release unused memory."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 3
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arenas)
    return options
