"""ONNX Runtime sessions of a rank."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from ortflow.workflow.device import HALF_PRECISIONS, Device
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.forms import Form, Target
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.sessions.failures import SESSION_ERRORS, ran_out
from ortflow.workflow.sessions.recording import Session, SessionRecording
from ortflow.workflow.sessions.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    from ortflow.workflow.cuda.operators import Operators

SEVERITY = {"verbose": 0, "info": 1, "warning": 2, "error": 3, "fatal": 4}
_SHARING = threading.Lock()
"""Threads that open their first sessions at once make one arena: ONNX Runtime refuses a second one of a device."""


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
        self._opened: weakref.WeakSet[Session] = weakref.WeakSet()
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
            half = self.device.precision in HALF_PRECISIONS
            return Target(gpu=True, kernels=self.operators is not None, half=half).form_of(graph)
        return Target(gpu=False, kernels=self._kernels is not None).form_of(graph)

    def standard_form_of(self, graph: Path) -> Path:
        """Path of a form that contains only operators for which ONNX Runtime has kernels on the device."""
        form = Form.CUDA.of(graph)
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

    def record(self) -> SessionRecording:
        """Record the times of the nodes of all sessions that are open now; see `SessionRecording`."""
        from ortflow.workflow.sessions.limits import measured

        return SessionRecording(sorted(self._opened, key=lambda session: session.graph), lambda: measured(self))

    def open(
        self, model: Path | bytes, *, as_written: bool = False, records: str | None = None
    ) -> onnxruntime.InferenceSession:
        """Open a session of a graph.

        Files are passed as bytes, so that no path in them is followed. With `as_written`, ONNX Runtime does not
        optimise. With `records`, it records the times of the nodes in a file whose name begins with it.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = self._severity
        options.use_deterministic_compute = True
        if records is not None:
            options.enable_profiling, options.profile_file_prefix = True, records
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
        providers = self.device.providers()
        self.device.memory_moves()
        try:
            session = Session(
                content, options, providers=providers, disabled_optimizers=[*self.settings.disabled] or None
            )
        except SESSION_ERRORS as error:
            if ran_out(str(error)):
                raise self.device.failure(str(error)) from error
            name = model.name if isinstance(model, Path) else "graph"
            raise OrtflowError(f"ONNX Runtime refuses {name}: {error}") from error
        first = providers[0] if isinstance(providers[0], str) else providers[0][0]
        if first not in session.get_providers():
            # ONNX Runtime only logs this, and uses the next provider.
            raise OrtflowError(f"ONNX Runtime cannot load its {first}")
        if records is None:
            session.graph = model.name.partition(".")[0] if isinstance(model, Path) else "graph"
            session.content = model
            session.again = lambda prefix: self.open(model, as_written=as_written, records=prefix)
            self._opened.add(session)
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
    """Free each value after its last reader; results do not change."""
    # By default, ONNX Runtime keeps the memory of a dead value for a later one of its shape.
    options.enable_mem_reuse = False
    # By default, it reserves a block for a whole run beside the memory that it has already.
    options.enable_mem_pattern = False
    # In the default order, the nodes of weight gradients run last.
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # By default, each session has memory of its own.
    with _SHARING:
        _share_memory("Cpu", 0)
        if device.kind == "cuda":
            _share_memory("Cuda", device.index)
    options.add_session_config_entry("session.use_env_allocators", "1")


@functools.cache
def _share_memory(device: str, index: int) -> None:
    """Create one arena per device, from which all sessions of this process allocate."""
    kind = onnxruntime.OrtMemoryInfo(
        device, onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, index, onnxruntime.OrtMemType.DEFAULT
    )
    # Grow by the requested size, not to the next power of two, over whose rest small values would scatter.
    config = onnxruntime.OrtArenaCfg({"arena_extend_strategy": 1})
    if device == "Cpu":
        onnxruntime.create_and_register_allocator(kind, config)
        return
    onnxruntime.create_and_register_allocator_v2("CUDAExecutionProvider", kind, {"device_id": str(index)}, config)
