"""ortflow's graphs in a minimal loop: flat buffers, a training graph, an optimizer graph.

The trainer does the same with ranks, accumulation and checkpoints; here only the graphs are tested.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from case import Batch
from safetensors.numpy import load_file

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT, SEED, GraphSet
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.kernels.library import find_library
from ortflow.workflow.layout import Entry
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.gradient import gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import segments
from ortflow.workflow.spec.model import Loss
from ortflow.workflow.spec.optimizers import Adam, moments
from ortflow.workflow.spec.run import TrainerRunSpec

LIBRARY = None if os.environ.get("ORTFLOW_TEST_KERNELS") == "onnxruntime" else find_library().path
"""Our own kernels, as ranks use them; ONNX Runtime's alone where the variable says so."""


def graphs_of(model: Path, loss: Loss, optimizer: Adam, out: Path, labels: Sequence[str] = ()) -> GraphSet:
    """The graphs that configure builds from a model file."""
    spec = TrainerRunSpec.model_validate(
        {
            "name": "torch",
            "model": {"path": str(model), "loss": loss.model_dump(), "labels": list(labels)},
            "data": {"train": {"path": "unused"}, "micro_batch": 1},
            "train": {"steps": 1, "optimizer": optimizer.model_dump()},
        }
    )
    return build_graphs(spec, out)


class FlatRun:
    """Parameters, gradients and moments as flat buffers, bound to the graphs."""

    def __init__(self, graphs: GraphSet, optimizer: Adam) -> None:
        self.index, self.lr, self.steps = graphs.index, optimizer.lr, 0
        count, trained = graphs.index.size, graphs.index.trained
        self.buffers = {"parameters": np.zeros(count, np.float32), "state_new": np.zeros(count, np.float32)}
        for name in ("gradients", *moments(optimizer)):
            self.buffers[name] = np.zeros(trained, np.float32)
        for name, values in load_file(graphs.initial).items():
            self.view("parameters", name)[...] = values

        faster = Form.KERNELS.of(graphs.train)
        assert LIBRARY is None or faster.exists(), graphs.notes
        self.train = _session(faster if LIBRARY else graphs.train)
        self.train_binding = self.train.io_binding()
        self.draws = SEED in {value.name for value in self.train.get_inputs()}
        self.batch_inputs = [entry.name for entry in graphs.inputs]
        produced = {output.name for output in self.train.get_outputs()}
        for entry in graphs.index:
            self._bind(self.train_binding.bind_input, entry.name, "parameters", entry)
            for output, buffer in ((f"{entry.name}_grad", "gradients"), (f"{entry.name}_new", "state_new")):
                if output in produced:
                    self._bind(self.train_binding.bind_output, output, buffer, entry)
        for name in (LOSS_SUM, LOSS_WEIGHT):
            self.train_binding.bind_output(name, "cpu")

        self.average = _session(with_kernels(gradient_graph()) if LIBRARY else gradient_graph())
        parts = segments(optimizer, graphs.index)
        update = optimizer_graph(optimizer, parts)
        self.update = _session(compose(with_kernels(update) if LIBRARY else update))
        self.update_binding = self.update.io_binding()
        for i, part in enumerate(parts):
            for name in ("parameters", "gradients", *moments(optimizer)):
                pointer = self.buffers[name][part.start : part.stop].ctypes.data
                where = ("cpu", 0, np.float32, [part.count], pointer)
                self.update_binding.bind_input(f"{name}.{i}", *where)
                if name != "gradients":
                    self.update_binding.bind_output(f"{name}.{i}.out", *where)

    def view(self, buffer: str, name: str) -> np.ndarray:
        """A tensor of a flat buffer."""
        entry = self.index[name]
        return self.buffers[buffer][entry.offset : entry.end].reshape(entry.tensor.shape)

    def _bind(self, bind, name: str, buffer: str, entry: Entry) -> None:
        pointer = self.buffers[buffer][entry.offset :].ctypes.data
        bind(name, "cpu", 0, np.float32, list(entry.tensor.shape), pointer)

    def gradients(self, batch: Batch) -> tuple[float, float]:
        """Fill the gradient buffer (of the loss summed over the batch) and the new state; loss sum and weight."""
        for name in self.batch_inputs:
            self.train_binding.bind_cpu_input(name, np.ascontiguousarray(batch[name]))
        if self.draws:
            self.train_binding.bind_cpu_input(SEED, np.array([self.steps]))
        self.train.run_with_iobinding(self.train_binding)
        loss, weight = (value.numpy().item() for value in self.train_binding.get_outputs()[-2:])
        return loss, weight

    def step(self, batch: Batch) -> float:
        """One optimizer step; the mean loss before it."""
        loss, weight = self.gradients(batch)
        start, stop = self.index.span("state")
        self.buffers["parameters"][start:stop] = self.buffers["state_new"][start:stop]
        scale = {"inverse_weight": np.float32([1 / weight]), "max_norm": np.float32([np.inf])}
        (self.buffers["gradients"][...],) = self.average.run(
            ["gradients.out"], {"gradients": self.buffers["gradients"], **scale}
        )
        self.steps += 1
        self.update_binding.bind_cpu_input("learning_rate", np.float32([self.lr]))
        self.update_binding.bind_cpu_input("step", np.array([self.steps], np.int64))
        self.update.run_with_iobinding(self.update_binding)
        return loss / weight

    def norms(self) -> Mapping[str, float]:
        """L2 norm of each parameter."""
        names = [entry.name for entry in self.index if entry.tensor.group != "state"]
        return {name: float(np.linalg.norm(self.view("parameters", name))) for name in names}


def _session(graph: Path | onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if LIBRARY is not None:
        options.register_custom_ops_library(str(LIBRARY))
    return ort.InferenceSession(
        str(graph) if isinstance(graph, Path) else graph.SerializeToString(),
        options,
        providers=["CPUExecutionProvider"],
    )
