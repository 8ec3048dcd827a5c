"""The forms of a graph: the same results with the operators of a device. Which one a rank runs is decided here.

The forms of a graph lie beside it, and any of them may be missing. Must never import ONNX or ONNX Runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Form(Enum):
    """A form of a graph. The value is what its file name has before `.onnx`."""

    PLAIN = ""
    """With standard operators, for CPUs."""
    KERNELS = "kernels"
    """With ortflow's operators for CPUs (`ortflow.workflow.kernels`)."""
    CUDA = "cuda"
    """With standard operators, adapted to GPUs (`ortflow.workflow.graph.optimize.on_cuda`)."""
    PLACED = "placed"
    """With ortflow's operators for GPUs (`ortflow.workflow.cuda`). No rank runs it: FUSED is made from it."""
    FUSED = "fused"
    """With ortflow's operators and fused kernels (`ortflow.workflow.fusion`)."""
    HALF = "half"
    """The same in half precision (`ortflow.workflow.fusion.halved`)."""

    def of(self, graph: Path) -> Path:
        """Path of a graph -> path of its form; it may not exist."""
        return graph.with_suffix(f".{self.value}.onnx") if self.value else graph


@dataclass(frozen=True)
class Target:
    """What runs a graph."""

    gpu: bool
    kernels: bool
    """Whether the process has ortflow's operators for the device."""
    half: bool = False
    """Whether it trains in half precision."""

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms that it can run besides PLAIN, the fastest first."""
        if not self.gpu:
            return (Form.KERNELS,) if self.kernels else ()
        return (*([Form.HALF] if self.half else []), *([Form.FUSED] if self.kernels else []), Form.CUDA)

    def form_of(self, graph: Path) -> Path | None:
        """Path of the form that it runs; None if that is the graph itself."""
        return next((path for path in (form.of(graph) for form in self.forms) if path.exists()), None)
