"""ONNX Runtime sessions as ranks run them, and binding them to flat buffers."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from ortflow.workflow.device import Buffer, Device
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.types import with_kernels_of
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import native, onnxruntime

SEVERITY = {"verbose": 0, "info": 1, "warning": 2, "error": 3, "fatal": 4}


class Sessions:
    """Makes every session of a rank alike: its threads, its log level, its device, its library of kernels."""

    def __init__(self, device: Device, threads: int, log_level: str, kernels: Path | None = None) -> None:
        self.device, self._threads, self._severity = device, threads, SEVERITY[log_level]
        self._kernels = kernels
        onnxruntime.set_default_logger_severity(self._severity)

    def open_fastest(self, graph: Path) -> onnxruntime.InferenceSession:
        """A session of a graph: of the one with our own operators, where there are that and a library of kernels."""
        return self.open(with_kernels_of(graph) if self.has_kernels(graph) else graph)

    def has_kernels(self, graph: Path) -> bool:
        """Whether `open_fastest` takes the graph with our own operators."""
        return self._kernels is not None and with_kernels_of(graph).exists()

    @property
    def kernels(self) -> str:
        """Name of the library of kernels: it tells processor and source; empty where there is none."""
        return self._kernels.name if self._kernels is not None else ""

    def open(self, model: Path | bytes, *, as_written: bool = False) -> onnxruntime.InferenceSession:
        """A session of a graph of ours; files are handed over as bytes, so that none is followed out of its folder.

        `as_written`: without ONNX Runtime's optimisations.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = self._severity
        options.use_deterministic_compute = True
        if as_written:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        _save_memory(options)
        # A rank has several sessions and each its own threads: idle ones must not spin beside the one at work.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if self._kernels is not None:
            options.register_custom_ops_library(str(self._kernels))
        content = model if isinstance(model, bytes) else model.read_bytes()
        try:
            return onnxruntime.InferenceSession(content, options, providers=self.device.providers())
        except SESSION_ERRORS as error:
            name = model.name if isinstance(model, Path) else "graph"
            raise OrtflowError(f"ONNX Runtime refuses {name}: {error}") from error


def _save_memory(options: onnxruntime.SessionOptions) -> None:
    """Hold each value from the node that makes it to the last that reads it, and no longer; no result changes.

    ONNX Runtime would keep the memory of a dead value for a later one of its shape, plan a block for a whole run beside
    the memory it has already, run the nodes that make weight gradients last, and give each session memory of its own.
    """
    options.enable_mem_reuse = False
    options.enable_mem_pattern = False
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    _share_memory()
    options.add_session_config_entry("session.use_env_allocators", "1")


@functools.cache
def _share_memory() -> None:
    """Make the one arena that all sessions of this process take their memory from."""
    kind = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    onnxruntime.create_and_register_allocator(kind, onnxruntime.OrtArenaCfg({}))


class Binding:
    """An I/O binding of a session: graph inputs and outputs tied to slices of flat buffers or to arrays."""

    def __init__(self, session: onnxruntime.InferenceSession, device: Device) -> None:
        self._session, self._device = session, device
        self._binding = session.io_binding()
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = 3
        self._kept: dict[str, Any] = {}
        self.inputs = {value.name for value in session.get_inputs()}
        self.outputs = {value.name for value in session.get_outputs()}

    def read_from(self, name: str, buffer: Buffer, shape: tuple[int, ...]) -> None:
        """Tie an input to a buffer."""
        self._kept[name] = buffer  # ONNX Runtime knows its address alone
        self._binding.bind_input(name, self._device.kind, self._device.index, buffer.dtype, list(shape), buffer.pointer)

    def write_to(self, name: str, buffer: Buffer, shape: tuple[int, ...]) -> None:
        """Tie an output to a buffer."""
        self._kept[name] = buffer
        self._binding.bind_output(
            name, self._device.kind, self._device.index, buffer.dtype, list(shape), buffer.pointer
        )

    def read_tensors(self, index: FlatIndex, buffer: Buffer) -> None:
        """Tie every input that the index names to its slice."""
        for entry in index:
            if entry.name in self.inputs:
                self.read_from(entry.name, buffer.slice(entry.offset, entry.end), entry.tensor.shape)

    def feed(self, name: str, array: Any) -> None:
        """Tie an input to an array's values; the array must live until the run is over."""
        value = onnxruntime.OrtValue.ortvalue_from_numpy(array, self._device.kind, self._device.index)
        self._kept[name] = (array, value)
        self._binding.bind_ortvalue_input(name, value)

    def run(self, *, give_back: bool = False) -> None:
        """Run the graph once; with `give_back`, return to the system what the shared arena holds unused behind it.

        Raises UserError where a node refuses what it is given: the same batch would be refused again.
        """
        try:
            self._session.run_with_iobinding(self._binding, _give_back() if give_back else self._options)
        except SESSION_ERRORS as error:
            raise _refusal(str(error)) from error

    def fetch(self, outputs: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Run the graph once; these outputs, none of which may be tied, as arrays on the host."""
        for name in outputs:
            self._binding.bind_output(name)
        self.run()
        fetched: list[npt.NDArray[Any]] = self._binding.copy_outputs_to_cpu()
        return fetched


def _give_back() -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.log_severity_level = 3
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


def _refusal(message: str) -> OrtflowError:
    """What ONNX Runtime says of a failed run, shortened to what a person can act on."""
    if "alloc" in message.lower():
        return OrtflowError(f"out of memory in a step: {message}")
    node = re.search(r"while running (\S+) node\. Name:'([^']*)' Status Message: (.*)", message, re.DOTALL)
    if node is None:
        return OrtflowError(f"ONNX Runtime failed in a step: {message}")
    operator, name, reason = node.groups()
    reason = re.sub(r"^/\S+ .*?\) ", "", " ".join(reason.split()))
    return UserError(
        f"node {name!r} ({operator}) of the graph refuses the batch: {reason}",
        fix="give data of the lengths and values the model was exported for",
    )


SESSION_ERRORS = (RuntimeError, *(
    getattr(native, name)
    for name in (
        "Fail", "InvalidArgument", "NoSuchFile", "NoModel", "EngineError", "RuntimeException", "InvalidProtobuf",
        "ModelLoaded", "NotImplemented", "InvalidGraph", "EPFail",
    )
))  # fmt: skip
