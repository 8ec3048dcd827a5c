"""ONNX Runtime sessions of a rank, and their binding to flat buffers."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ortflow.workflow.device import HALF_PRECISIONS, Buffer, Device
from ortflow.workflow.device.shard import Sliced
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.types import fused_of, half_of, on_cuda_of, with_kernels_of
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.onnx_runtime import native, onnxruntime
from ortflow.workflow.sessions.collectives import take_error
from ortflow.workflow.sessions.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from ortflow.workflow.cuda.operators import Operators

_FLOATS = {"tensor(float)": 1, "tensor(float16)": 10, "tensor(bfloat16)": 16}
"""ONNX Runtime's name of a type -> its number in onnx.TensorProto."""
SEVERITY = {"verbose": 0, "info": 1, "warning": 2, "error": 3, "fatal": 4}


class Sessions:
    """Opens every session of a rank in the same way: threads, log level, device, kernels.

    `settings` are the result of the runtime check.
    """

    def __init__(
        self,
        device: Device,
        threads: int,
        log_level: str,
        kernels: Path | None = None,
        settings: Settings = DEFAULTS,
        *,
        fuse: bool = True,
    ) -> None:
        self.device, self.threads, self._severity = device, threads, SEVERITY[log_level]
        self._kernels, self.settings = kernels, settings
        self.operators: Operators | None = _operators_of(device) if fuse else None
        """Ours on a GPU; None where ONNX Runtime's compute alone."""
        onnxruntime.set_default_logger_severity(self._severity)

    def exact(self) -> Sessions:
        """Those for comparisons, whatever the run's precision."""
        device = self.device.exact()
        if device is self.device:
            return self
        sessions = copy.copy(self)
        sessions.device = device
        return sessions

    def on_host(self) -> Sessions:
        """Those that compute on the CPU, with ONNX Runtime's own kernels if the device is another one."""
        if self.device.kind == "cpu":
            return self
        from ortflow.workflow.device.cpu import CpuDevice

        sessions = copy.copy(self)
        sessions.device, sessions._kernels, sessions.operators = CpuDevice(), None, None
        return sessions

    def open_fastest(self, graph: Path) -> onnxruntime.InferenceSession:
        """A session of a graph in its form for the device, with our own operators if there is a library."""
        return self.open(self.fastest_form_of(graph))

    def fastest_form_of(self, graph: Path) -> Path:
        """The file that `open_fastest` opens."""
        return self.form_of(graph) or graph

    def form_of(self, graph: Path) -> Path | None:
        """Path of the form that `open_fastest` uses; None if it is the graph itself."""
        if self.device.kind == "cuda":
            if self.device.precision in HALF_PRECISIONS and half_of(graph).exists():
                return half_of(graph)
            form = fused_of(graph) if self.operators is not None and fused_of(graph).exists() else on_cuda_of(graph)
        elif self._kernels is not None:
            form = with_kernels_of(graph)
        else:
            return None
        return form if form.exists() else None

    def standard_form_of(self, graph: Path) -> Path:
        """Path of a form that contains only operators for which ONNX Runtime has kernels on the device."""
        form = on_cuda_of(graph)
        return form if self.device.kind == "cuda" and form.exists() else graph

    @property
    def library(self) -> Path | None:
        """The library of kernels for the CPU; None if there is none."""
        return self._kernels

    @property
    def kernels(self) -> str:
        """Kernels besides ONNX Runtime's CPU kernels, for the record; empty if there are none.

        The library's name, which identifies processor and sources, or the GPU.
        """
        if self.device.kind != "cpu":
            return self.processor
        return self._kernels.name if self._kernels is not None else ""

    @property
    def processor(self) -> str:
        """The device, and whether it uses fused kernels."""
        return self.device.name if self.operators is None else f"{self.device.name}, fused kernels"

    def open(self, model: Path | bytes, *, as_written: bool = False) -> onnxruntime.InferenceSession:
        """Open a session of a graph.

        Files are passed as bytes, so that no path in them is followed. With `as_written`, ONNX Runtime does not
        optimise.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = self._severity
        options.use_deterministic_compute = True
        if as_written or not self.settings.optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        _save_memory(options, self.device)
        # A rank has several sessions with threads of their own: idle ones must not spin beside the active one.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if self._kernels is not None:
            options.register_custom_ops_library(str(self._kernels))
        content = model if isinstance(model, bytes) else model.read_bytes()
        if self.operators is not None and CUDA_DOMAIN.encode() in content:
            content = self.operators.bind(content)
            options.register_custom_ops_library(str(self.operators.path))
        wanted = self.device.providers()
        self.device.memory_moves()
        try:
            session = onnxruntime.InferenceSession(
                content, options, providers=wanted, disabled_optimizers=[*self.settings.disabled] or None
            )
        except SESSION_ERRORS as error:
            if _ran_out(str(error)):
                raise self.device.failure(str(error)) from error
            name = model.name if isinstance(model, Path) else "graph"
            raise OrtflowError(f"ONNX Runtime refuses {name}: {error}") from error
        first = wanted[0] if isinstance(wanted[0], str) else wanted[0][0]
        if first not in session.get_providers():
            # ONNX Runtime only logs this, and uses the next provider.
            raise OrtflowError(f"ONNX Runtime cannot load its {first}")
        return session


def _operators_of(device: Device) -> Operators | None:
    """Those of a GPU; None on the CPU, and where something is missing, which the log then says."""
    from ortflow.workflow.device.cuda import CudaDevice

    if not isinstance(device, CudaDevice):
        return None
    from ortflow.workflow.cuda.memsets import memsets_as_kernels
    from ortflow.workflow.cuda.operators import Operators

    kernels = Operators(device)
    if kernels.path is None and device.precision in HALF_PRECISIONS:
        raise UserError(
            f"is {device.precision}, which needs ortflow's kernels: {kernels.note}",
            where="train.precision",
            fix="set it to fp32 or tf32",
        )
    if kernels.path is None:
        print(f"kernels are not fused: {kernels.note}", flush=True)
        return None
    device.edits.append(functools.partial(memsets_as_kernels, kernels.compiler))
    return kernels


def _save_memory(options: onnxruntime.SessionOptions, device: Device) -> None:
    """Free each value after its last reader; results do not change.

    By default, ONNX Runtime keeps the memory of a dead value for a later one of its shape, reserves a block for a whole
    run beside the memory it has already, runs the nodes of weight gradients last, and gives each session memory of its
    own.
    """
    options.enable_mem_reuse = False
    options.enable_mem_pattern = False
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    _share_memory("Cpu", 0)
    if device.kind == "cuda":
        _share_memory("Cuda", device.index)
    options.add_session_config_entry("session.use_env_allocators", "1")


@functools.cache
def _share_memory(where: str, index: int) -> None:
    """Create one arena per device, from which all sessions of this process allocate."""
    kind = onnxruntime.OrtMemoryInfo(
        where, onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, index, onnxruntime.OrtMemType.DEFAULT
    )
    # Grow by the requested size, not to the next power of two, over whose rest small values would scatter.
    config = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1})
    if where == "Cpu":
        onnxruntime.create_and_register_allocator(kind, config)
        return
    onnxruntime.create_and_register_allocator_v2("CUDAExecutionProvider", kind, {"device_id": str(index)}, config)


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
        self.read_on_host = _read_on_host(session) if device.kind == "cuda" else frozenset[str]()
        """Inputs that a CPU node reads: ONNX Runtime copies them from the GPU when they are bound, and only then."""
        self._tied_on_host: dict[str, tuple[Buffer, tuple[int, ...], Any]] = {}
        self.outputs = {value.name for value in session.get_outputs()}

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

        Otherwise the run is over when this returns: ONNX Runtime uses memory of the host again behind it, from which
        the GPU may still have to copy. With `give_back`, return to the system what the shared arena holds unused.

        Raises UserError if a node refuses what it is given: the same batch would be refused again.
        """
        if self._tied_on_host:
            self.device.synchronize()
            for name, (buffer, shape, kind) in self._tied_on_host.items():
                self._tie(name, buffer, shape, kind)
        try:
            options = self._queued if self.device.capturing else self._options
            if give_back:
                self.device.memory_moves()
                options = _shrinking(self.device.arenas)
            self._session.run_with_iobinding(self._binding, options)
        except SESSION_ERRORS as error:
            raised = take_error()
            if raised is not None:
                raise raised from None
            raise self.device.failure(str(error)) if _ran_out(str(error)) else run_failure(str(error)) from error

    def run_for(self, outputs: Sequence[str]) -> dict[str, onnxruntime.OrtValue]:
        """Run the graph once; these outputs, none of which may be tied, on the device.

        They are this binding's, and live until `forget` or the next run.
        """
        self.forget(outputs)
        self.run()
        made = self._binding.get_outputs() if outputs else []
        places = {name: place for place, name in enumerate(self._bound)}
        return {name: made[places[name]] for name in outputs}

    def keep(self, made: Mapping[str, onnxruntime.OrtValue]) -> None:
        """Let later runs write what `run_for` has made to the same memory, until `forget`."""
        for name, value in made.items():
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


def _read_on_host(session: onnxruntime.InferenceSession) -> frozenset[str]:
    """The inputs that a session on a GPU reads from the host's memory."""
    places = session.get_input_memory_infos()
    return frozenset(
        value.name for value, place in zip(session.get_inputs(), places, strict=True) if place.name == "Cpu"
    )


def _ran_out(message: str) -> bool:
    """Whether ONNX Runtime failed for lack of memory."""
    return any(word in message.lower() for word in ("alloc", "out of memory"))


def _shrinking(arenas: str) -> onnxruntime.RunOptions:
    """Options of a run after which `arenas` release unused memory."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 3
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arenas)
    return options


def run_failure(message: str) -> OrtflowError:
    """ONNX Runtime's message about a failed run, shortened to what the user can act on."""
    library = re.search(r"(\w+) failure (\d+): (.*?) ; GPU=.*?; expr=(.*?);", message, re.DOTALL)
    if library is not None:
        name, code, reason, call = library.groups()
        return OrtflowError(f"ONNX Runtime failed in a step: {call}: {reason} ({name} error {code})")
    node = re.search(r"while running (\S+) node\. Name:'([^']*)' Status Message: (.*)", message, re.DOTALL)
    if node is None:
        return OrtflowError(f"ONNX Runtime failed in a step: {message}")
    operator, name, reason = node.groups()
    reason = re.sub(r"^/\S+ .*?\) ", "", " ".join(reason.split()))
    return UserError(
        f"node {name!r} ({operator}) of the graph rejects the batch: {reason}",
        fix="use data with the lengths and values that the model was exported for",
    )


SESSION_ERRORS = (RuntimeError, *(
    getattr(native, name)
    for name in (
        "Fail", "InvalidArgument", "NoSuchFile", "NoModel", "EngineError", "RuntimeException", "InvalidProtobuf",
        "ModelLoaded", "NotImplemented", "InvalidGraph", "EPFail",
    )
))  # fmt: skip
