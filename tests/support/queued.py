"""The trainer for GPUs on a fake GPU: memory, streams and CUDA graphs by `fake_cuda`, sessions on the CPU.

Also a small network and steps for it, which tests on a real GPU use too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fake_cuda import FakeBlas, FakeCuda
from graph_build_models import Array, save_model, value
from onnx import TensorProto, helper
from safetensors.numpy import load_file

from ortflow.workflow.comm import Communicator
from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.blas import Blas
from ortflow.workflow.device.cuda import CudaDevice
from ortflow.workflow.device.cudart import Runtime
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.ir.edit import replace
from ortflow.workflow.graph.types import LOSS_SCALE, GraphSet
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.gradient import queued_gradient_graph
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.guard import guarded
from ortflow.workflow.optim.segments import segments_of
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import MicroBatch, Report, StepOutcome
from ortflow.workflow.trainer.opening import open_trainer
from ortflow.workflow.trainer.step import GraphTrainer


class FakeDevice(CudaDevice):
    """A device with host memory, so that ONNX Runtime's CPU provider computes on it."""

    kind = "cpu"
    comparisons: FakeDevice | None = None
    """The device of sessions that compare precisions, if it is another one."""

    def exact(self) -> CudaDevice:
        return self.comparisons or super().exact()

    def providers(self) -> list[str | tuple[str, dict[str, str]]]:
        return ["CPUExecutionProvider"]

    @property
    def arenas(self) -> str:
        return "cpu:0"

    def blas(self) -> Blas:
        if self._blas is None:
            self._blas = Blas(FakeBlas(self.library), self.stream)
        return self._blas

    @property
    def library(self) -> FakeCuda:
        library = self.here().library
        assert isinstance(library, FakeCuda)
        return library


class Fake:
    """The library, the device, the log of one rank, and the sessions of its newest trainer; a test may make several."""

    sessions: Sessions
    on_run: Callable[[Binding], None] | None = None
    """Called whenever a graph is queued, behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: FakeCuda | None = None) -> None:
        self.library = library or FakeCuda()
        run = getattr(Binding.run, "plain", Binding.run)

        def queue(binding: Binding, **options: Any) -> None:
            fed = binding.fed

            def work() -> None:
                # A CUDA graph would use the memory that it was captured on.
                assert binding.fed == fed, "launched for a batch of another shape, or in other memory"
                run(binding, **options)

            assert isinstance(binding.device, FakeDevice)
            binding.device.library.kernel(work)
            if self.on_run is not None:
                self.on_run(binding)

        queue.plain = run  # type: ignore[attr-defined]
        monkeypatch.setattr(Binding, "run", queue)
        runtime = Runtime(self.library)
        self.device = FakeDevice(runtime, runtime.describe(0))
        self.log: list[str] = []
        self.warnings: list[str] = []

    def trainer(
        self,
        graphs: GraphSet,
        spec: TrainerRunSpec,
        communicator: Communicator | None = None,
        *,
        train: onnx.ModelProto | None = None,
        single: onnx.ModelProto | None = None,
        kernels: Path | None = None,
        begins: bool = False,
    ) -> GraphTrainer:
        """The trainer for graphs that `build_graphs` has written.

        `train` replaces the training graph, and `single` the one that comparisons of precisions use. `kernels` is a
        library of operators that they may have. With `begins`, the update multiplies the gradients, as where a GPU has
        ortflow's operators.
        """
        update = compose(optimizer_graph(spec.train.optimizer, segments_of(spec.train, graphs.index)))
        scaling = squares_by_onnx(queued_gradient_graph(fused=True)) if begins else queued_gradient_graph()
        graphs.optimizer.write_bytes(guarded(update, multiplied=begins).SerializeToString())
        graphs.gradient.write_bytes(scaling.SerializeToString())
        if train is not None:
            graphs.train.write_bytes(train.SerializeToString())
        self.sessions = Sessions(self.device, 1, "error", kernels, fuse=False)
        report = Report(note=self.log.append, warn=self.warnings.append)
        trainer = open_trainer(graphs, spec, self.sessions, communicator or SoloCommunicator(), report, loop="queued")
        if single is not None:
            device = self.device
            device.comparisons = FakeDevice(
                Runtime(self.library), device.gpu, stream=device.stream, captured=device.captured
            )
            graphs.train.write_bytes(single.SerializeToString())
        trainer.load_tensors(load_file(graphs.initial))
        return trainer


def squares_by_onnx(model: onnx.ModelProto) -> onnx.ModelProto:
    """A graph whose SquareSum is written as `Builder.square_sum` does, with the bits of the graph without it."""
    (node,) = [each for each in model.graph.node if each.op_type == "SquareSum"]
    build = Builder("squares")
    build.square_sum("gradients", output="sum")
    within = onnx.compose.add_prefix_graph(build.graph, "squares/")
    for made in within.node:
        made.input[:] = [node.input[0] if name == "squares/gradients" else name for name in made.input]
        made.output[:] = [node.output[0] if name == "squares/sum" else name for name in made.output]
    place = list(model.graph.node).index(node)
    replace(model.graph.node, [*model.graph.node[:place], *within.node, *model.graph.node[place + 1 :]])
    model.graph.initializer.extend(within.initializer)
    return model


def network(path: Path, *more: str) -> Path:
    """Five numbers to three classes through BatchNormalization, and nodes `more`; no tensor has a multiple of 64
    elements."""
    random = np.random.default_rng(0)
    tensors: dict[str, Array] = {
        "w": random.normal(size=(5, 7)).astype("float32"),
        "b": random.normal(size=7).astype("float32"),
        "scale": np.ones(7, "float32"),
        "shift": np.zeros(7, "float32"),
        "mean": np.zeros(7, "float32"),
        "var": np.ones(7, "float32"),
        "u": random.normal(size=(7, 3)).astype("float32"),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], name="/in"),
        helper.make_node("BatchNormalization", ["h", "scale", "shift", "mean", "var"], ["n"], name="/norm"),
        helper.make_node("Relu", ["n"], ["r"], name="/relu"),
        *(helper.make_node(each, ["r"], ["d"], name="/more") for each in more),
        helper.make_node("MatMul", ["d" if more else "r", "u"], ["y"], name="/out"),
    ]
    return save_model(path, nodes, [value("x", ["batch", 5])], [value("y", ["batch", 3])], tensors)


def steps_of(sizes: Sequence[Sequence[int]], damaged: Sequence[int] = ()) -> list[list[MicroBatch]]:
    """Micro-batches of so many rows; a damaged step has a NaN in its last one."""
    random, made = np.random.default_rng(1), []
    for step, counts in enumerate(sizes):
        x = [random.normal(size=(count, 5)).astype("float32") for count in counts]
        if step in damaged:
            x[-1][3, 2] = np.nan
        made.append([MicroBatch({"x": each, "labels": random.integers(0, 3, len(each))}, len(each)) for each in x])
    return made


def train(trainer: GraphTrainer, steps: list[list[MicroBatch]]) -> list[tuple[float, float, str | None]]:
    found, updates = [], 0
    for number, batches in enumerate(steps):
        rate = 1e-3 * (1 - number / len(steps))
        outcome = trainer.step(
            batches, learning_rate=rate, update=updates + 1, seeds=[1] * len(batches), control_values=[2.0]
        )
        assert outcome.control_values == [2.0]
        updates += outcome.skipped is None
        found.append((outcome.loss, outcome.grad_norm, outcome.skipped))
    return found


def state_of(trainer: GraphTrainer) -> dict[str, Array]:
    return {name: buffer.read() for name, buffer in trainer.state().items()}


def halved(train: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with gradients that were multiplied by the loss scale and rounded to fp16, as in fp16 training.

    They are eight times as large before the mean: in a micro-batch of 8 samples a scale of 1 is an eighth.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(train)
    copy.graph.input.append(value(LOSS_SCALE, [1]))
    for name, number in (("eight", 8.0), ("eighth", 0.125)):
        copy.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(number), name))
    for out in copy.graph.output:
        if out.name.endswith("_grad"):
            for node in copy.graph.node:
                for names in (node.input, node.output):
                    for place, name in enumerate(names):
                        names[place] = f"{name}/whole" if name == out.name else name
            name, half = out.name, TensorProto.FLOAT16
            shape = helper.make_node("Shape", [f"{name}/whole"], [f"{name}/shape"])
            scaled = helper.make_node("Mul", [f"{name}/whole", LOSS_SCALE], [f"{name}/once"])
            eight = helper.make_node("Mul", [f"{name}/once", "eight"], [f"{name}/scaled"])
            down = helper.make_node("Cast", [f"{name}/scaled"], [f"{name}/half"], to=half)
            up = helper.make_node("Cast", [f"{name}/half"], [f"{name}/single"], to=TensorProto.FLOAT)
            back = helper.make_node("Mul", [f"{name}/single", "eighth"], [f"{name}/up"])
            copy.graph.node.extend(
                [
                    shape,
                    scaled,
                    eight,
                    down,
                    up,
                    back,
                    helper.make_node("Reshape", [f"{name}/up", f"{name}/shape"], [name]),
                ]
            )
    return copy


def outcomes_of(
    trainer: GraphTrainer, steps: list[list[MicroBatch]], updates: int = 0, *, ahead: bool = True
) -> list[StepOutcome]:
    """Train. With `ahead` the passes of each step begin while the host waits for the step before, if they can."""
    found: list[StepOutcome] = []

    def given(batches: list[MicroBatch]) -> dict[str, Any]:
        return {"seeds": [1] * len(batches), "control_values": [2.0]}

    def begin() -> None:
        for batches in steps[len(found) + 1 : len(found) + 2]:
            trainer.begin(batches, **given(batches))

    if trainer.begins:
        trainer.before_wait = begin if ahead else lambda: None
    for batches in steps:
        found.append(trainer.step(batches, learning_rate=1e-3, update=updates + 1, **given(batches)))
        updates += found[-1].skipped is None
    return found
