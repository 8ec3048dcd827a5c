"""Runs a graph on PyTorch's tensors, without copies. Called by `engine`.

ONNX Runtime reads tensors where they are. What it allocates is given out as tensors that keep it alive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ortflow.torch.leases import Lease, any_captured, note
from ortflow.torch.memory import KINDS, tensor_over
from ortflow.workflow.device import Device
from ortflow.workflow.onnx_runtime import native, onnxruntime
from ortflow.workflow.sessions.binding import read_on_host
from ortflow.workflow.sessions.collectives import take_error
from ortflow.workflow.sessions.failures import SESSION_ERRORS, ran_out, run_failure

_CPU = torch.device("cpu")
_EMPTY = torch.zeros(1)
_NAMES = {
    "tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(int16)": 5, "tensor(int32)": 6,
    "tensor(int64)": 7, "tensor(bool)": 9, "tensor(float16)": 10, "tensor(double)": 11, "tensor(bfloat16)": 16,
}  # fmt: skip
_BOUND: dict[int, Any] = {kind: np.dtype(text).type for kind, (_, text) in KINDS.items()} | {16: 16}
"""Element type -> what SessionIOBinding takes for it: NumPy's type, or the number where NumPy has none."""


@dataclass(frozen=True)
class Queued:
    """A run of a graph, and the tensors that it reads."""

    binding: Any
    inputs: list[torch.Tensor]


class Graph:
    """A session whose inputs and outputs are tensors of one device."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        device: Device,
        on_host: Collection[str] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._session, self._device, self._on_host = session, device, frozenset(on_host)
        self._aliases = aliases or {}
        on_gpu = device.kind == "cuda"
        memory = native.OrtDevice.default_memory()
        self._host = self._place = native.OrtDevice(native.OrtDevice.cpu(), memory, 0)
        self._torch = torch.device("cpu")
        self._read_on_host: frozenset[str] = frozenset()
        if on_gpu:
            self._place = native.OrtDevice(native.OrtDevice.cuda(), memory, device.index)
            self._torch = torch.device("cuda", device.index)
            self._read_on_host = read_on_host(session)
        self.inputs = {value.name: _NAMES[value.type] for value in session.get_inputs()}
        self.outputs = [value.name for value in session.get_outputs()]
        self._options, self._queued = onnxruntime.RunOptions(), onnxruntime.RunOptions()
        for options in (self._options, self._queued):
            options.log_severity_level = 3
        if on_gpu:
            # By default, a run of ONNX Runtime's waits for the GPU at its end.
            self._queued.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def copies_to_host(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether ONNX Runtime reads a tensor on the host that is on the GPU."""
        return tensor.is_cuda and name in self._read_on_host

    def reads_in_place(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is bound where it is, without a conversion."""
        kind = KINDS[self.inputs[name]][0]
        return tensor.device == self._torch and tensor.dtype is kind and tensor.is_contiguous() and tensor.numel() > 0

    def memory_for(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Memory for an input of this shape."""
        return torch.empty(shape, dtype=KINDS[self.inputs[name]][0], device=self._torch)

    def _device_of(self, output: str) -> torch.device:
        return _CPU if output in self._on_host else self._torch

    def gradients(
        self, inputs: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """Run the graph, whose outputs are fp32 and of these shapes, into tensors of the caller. Raises UserError."""
        into = self.memory_of(shapes)
        self.run(inputs, into)
        return into

    def memory_of(self, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """Memory for fp32 outputs."""
        return {name: torch.empty(shape, dtype=torch.float32, device=self._torch) for name, shape in shapes.items()}

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor] | None = None,
        lease: Lease | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run the graph.

        Parameters
        ----------
        inputs
            Every input. Other element types than the graph's are converted.
        into
            Contiguous tensors for some of the outputs.
        lease
            See CapturedGraph; here, each call has memory of its own.

        Returns
        -------
        dict
            Every output, and the aliases.

        Raises
        ------
        UserError
            If a node refuses what it is given.
        """
        if lease is not None and self._device.kind == "cuda":
            note(lease)
        return self.results(self.queue(inputs, into), into)

    def handed_out(self, outputs: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[torch.Tensor]:
        """These outputs of a run, for a caller that may keep them: copies where captured graphs write such memory."""
        copies = self._device.kind == "cuda" and any_captured()
        return [outputs[name].clone() if copies else outputs[name] for name in names]

    def queue(
        self, inputs: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None, *, waits: bool = True
    ) -> Queued:
        """Run the graph as `run` does; without `waits`, for the GPU, it only is on the stream afterwards."""
        into = into or {}
        binding = native.SessionIOBinding(self._session._sess)
        tensors_in_use = []
        for name, kind in self.inputs.items():
            tensor = inputs[name]
            if tensor.dtype is not KINDS[kind][0]:
                tensor = tensor.to(KINDS[kind][0])
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
            if self.copies_to_host(name, tensor):
                # Bound on the GPU, it would be copied at once, on another stream than the one that computes it.
                tensor = tensor.cpu()
            tensors_in_use.append(tensor)
            place = self._place if tensor.is_cuda else self._host
            # PyTorch has no memory for a tensor without elements, and ONNX Runtime refuses a null pointer.
            address = tensor.data_ptr() or _EMPTY.data_ptr()
            binding.bind_input(name, place, _BOUND[kind], list(tensor.shape), address)
        for name in self.outputs:
            target = into.get(name)
            if target is None:
                binding.bind_output(name, self._host if name in self._on_host else self._place)
            else:
                binding.bind_output(
                    name, self._place, np.float32, list(target.shape), target.data_ptr() or _EMPTY.data_ptr()
                )
        try:
            self._session._sess.run_with_iobinding(binding, self._options if waits else self._queued)
        except SESSION_ERRORS as error:
            raised = take_error()
            if raised is not None:
                raise raised from None
            raise self._device.failure(str(error)) if ran_out(str(error)) else run_failure(str(error)) from error
        return Queued(binding, tensors_in_use)

    def results(self, run: Queued, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Every output of a run, and the aliases."""
        into = into or {}
        values = run.binding.get_outputs()
        outputs = {
            name: into[name] if name in into else tensor_over(values[number], self._device_of(name))
            for number, name in enumerate(self.outputs)
        }
        return outputs | {name: outputs[source] for name, source in self._aliases.items()}
